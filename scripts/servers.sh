#!/usr/bin/env bash
# Live proof: starts servers on exports of the real SmolLM2, asks them for tokens and compares these with our own reading
# of the files. Each server has an environment of its own, made from the pins in scripts/servers/*.txt the first time.
#
#   bash scripts/servers.sh [transformers] [gptqmodel] [vllm] [vllm-plugin] [llama-cpp]        default: all of them
#
#   QUANTFORGE_SERVERS        where environments, exports and logs go (default: .servers in the repository)
#   QUANTFORGE_SERVERS_MODEL  the original checkpoint (default: made as the quickstart does)
#   QUANTFORGE_SERVERS_JSON   where the rows go (default: servers.json among the above; rows of other servers stay)
#   QUANTFORGE_SERVERS_ONLY   exports to try, as a shell pattern (default: *), such as 'w8-*/gptq'
#   QUANTFORGE_THREADS        threads for each server (default: 2)
#
# A refusal is a result: it becomes a row, and the script goes on. It stops at anything else that fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh

WORK="${QUANTFORGE_SERVERS:-$ROOT/.servers}"
MODEL="${QUANTFORGE_SERVERS_MODEL:-$WORK/SmolLM2-135M-Instruct}"
ROWS="${QUANTFORGE_SERVERS_JSON:-$WORK/servers.json}"
THREADS="${QUANTFORGE_THREADS:-2}"
mkdir -p "$WORK/logs"
export TQDM_DISABLE=1

step() {
    printf '\n== %s (%s s so far)\n' "$1" "$SECONDS" >&2
}

# environment NAME: the interpreter of a server's environment, in SERVER. It counts as made when its stamp holds the pins.
environment() {
    local pins="scripts/servers/$1.txt"
    SERVER="$WORK/$1/bin/python"
    if ! cmp --quiet "$pins" "$WORK/$1/.pins"; then
        step "environment of $1"
        rm -rf "${WORK:?}/$1"
        "$PYTHON" -m venv "$WORK/$1"
        server_pip "$(sed -n 's/^\(torch==[^ ]*\)$/\1/p' "$pins")"
        "install_$1" "$pins"
        cp "$pins" "$WORK/$1/.pins"
    fi
}

server_pip() {
    "$SERVER" -m pip install --quiet --disable-pip-version-check --progress-bar off "$@"
}

install_transformers() {
    server_pip -r "$1"
}

install_vllm() {
    server_pip -r "$1"
    # What comes of these three without a GPU cannot be loaded beside torch+cpu, and vLLM imports them if they are there.
    "$SERVER" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

# plugin_environment: one that sees all that vLLM's environment has, and this package besides, without its dependencies:
# the plug-in needs none that vLLM has not.
plugin_environment() {
    environment vllm
    if [ ! -e "$WORK/vllm-plugin/.made" ]; then
        step "environment of vllm-plugin"
        rm -rf "$WORK/vllm-plugin"
        "$PYTHON" -m venv "$WORK/vllm-plugin"
        local folder='import sysconfig; print(sysconfig.get_paths()["purelib"])'
        "$SERVER" -c "$folder" >"$("$WORK/vllm-plugin/bin/python" -c "$folder")/vllm.pth"
        SERVER="$WORK/vllm-plugin/bin/python"
        server_pip --no-deps -e "$ROOT"
        touch "$WORK/vllm-plugin/.made"
    fi
    SERVER="$WORK/vllm-plugin/bin/python"
}

install_gptqmodel() {
    # GPTQModel comes as source, and asks for a torch of its own choice: what it needs is in the pins.
    server_pip "setuptools>=84" wheel ninja packaging
    server_pip -r "$1"
    server_pip --no-deps --no-build-isolation --no-binary gptqmodel -r scripts/servers/gptqmodel_alone.txt
}

# export_flags NAME: what to give `quantforge quantize` for it. One is made by the default solver; for how files are laid
# out it does not matter which one made them.
export_flags() {
    case "$1" in
    w4-sym-g64) echo --bits 4 --group-size 64 --method rtn --format compressed-tensors,gptq,gptq-v2,awq ;;
    w4-asym-g64) echo --bits 4 --group-size 64 --asym --format compressed-tensors,gptq,gptq-v2,awq ;;
    w4-sym-g32) echo --bits 4 --group-size 32 --method rtn --format compressed-tensors,gguf ;;
    w8-sym-g64) echo --bits 8 --group-size 64 --method rtn --format compressed-tensors,gptq ;;
    w8-asym-g64) echo --bits 8 --group-size 64 --asym --method rtn --format compressed-tensors,gptq ;;
    w8-sym-g32) echo --bits 8 --group-size 32 --method rtn --format gguf ;;
    w8a8) echo --bits 8 --group-size -1 --activation-bits 8 --method rtn ;;
    mixed) echo --bits 4 --group-size 64 --rule "*.down_proj=bits:8" --method rtn --format compressed-tensors,gptq ;;
    *) fail "no export is called $1" ;;
    esac
}

# cell SCRIPT EXPORT ARGUMENTS...: one comparison; EXPORT is NAME, or NAME/FORMAT where it has several, or the original.
# It is made the first time. Status 3 is a row that says apart or refused.
cell() {
    local status=0 script="$1" name="$2" path="$MODEL"
    local -a flags
    shift 2
    # shellcheck disable=SC2053  (a pattern is wanted)
    [[ "$name" == ${QUANTFORGE_SERVERS_ONLY:-*} ]] || return 0
    if [ "$name" != original ]; then
        path="$WORK/exports/$name"
        if [ ! -e "$path" ]; then
            step "export ${name%%/*}"
            read -r -a flags <<<"$(export_flags "${name%%/*}")"
            HF_HUB_OFFLINE=1 quantforge quantize "$MODEL" --dataset builtin --nsamples 8 --seqlen 512 \
                --token-weights none --quiet --output "$WORK/exports/${name%%/*}" "${flags[@]}" >&2
        fi
    fi
    step "$script $name"
    HF_HUB_OFFLINE=1 "$PYTHON" "scripts/servers/$script.py" "$path" "$@" --model "$MODEL" --threads "$THREADS" \
        --json "$ROWS" 2>>"$WORK/logs/$script.txt" || status=$?
    [ "$status" -eq 0 ] || [ "$status" -eq 3 ] || fail "$script $name: status $status; see $WORK/logs/$script.txt"
}

run_transformers() {
    environment transformers
    local name
    cell transformers_loader original --python "$SERVER"
    for name in w4-sym-g64/compressed-tensors w4-asym-g64/compressed-tensors w4-sym-g32/compressed-tensors \
        w8-sym-g64/compressed-tensors w8-asym-g64/compressed-tensors w8a8 mixed/compressed-tensors \
        w4-sym-g32/gguf w8-sym-g32; do
        cell transformers_loader "$name" --python "$SERVER"
    done
    for name in w4-asym-g64 w8-asym-g64; do
        cell transformers_loader "$name/compressed-tensors" --python "$SERVER" --dequantize
    done
}

run_gptqmodel() {
    environment gptqmodel
    local name
    for name in w4-sym-g64/gptq w4-asym-g64/gptq w8-sym-g64/gptq w8-asym-g64/gptq mixed/gptq \
        w4-sym-g64/gptq-v2 w4-asym-g64/gptq-v2 w4-sym-g64/awq w4-asym-g64/awq; do
        cell transformers_loader "$name" --python "$SERVER"
    done
}

run_vllm() {
    environment vllm
    local name
    cell vllm_server original --python "$SERVER"
    for name in w4-sym-g64/compressed-tensors w4-asym-g64/compressed-tensors w4-sym-g32/compressed-tensors \
        w4-sym-g64/gptq w4-sym-g64/gptq-v2 w4-sym-g64/awq w4-asym-g64/awq; do
        cell vllm_server "$name" --python "$SERVER" --dtype float16
    done
    for name in w4-sym-g64/compressed-tensors w4-asym-g64/compressed-tensors w8a8 \
        w4-asym-g64/gptq w4-asym-g64/gptq-v2 w8-sym-g64/gptq w8-asym-g64/gptq w8-sym-g64/compressed-tensors \
        w8-asym-g64/compressed-tensors mixed/compressed-tensors mixed/gptq; do
        cell vllm_server "$name" --python "$SERVER"
    done
    cell vllm_server w4-asym-g64/compressed-tensors --python "$SERVER" --env VLLM_CPU_INT4_W4A8=0
}

# The last ones are for a processor that has AVX2 and nothing newer: the server is told so where it is another.
run_vllm-plugin() {
    plugin_environment
    local name
    for name in w8-sym-g64/compressed-tensors w8-asym-g64/compressed-tensors w8-sym-g64/gptq w8-asym-g64/gptq \
        w4-asym-g64/gptq w4-asym-g64/gptq-v2 mixed/compressed-tensors mixed/gptq; do
        cell vllm_server "$name" --python "$SERVER" --dtype float16
    done
    for name in w4-asym-g64 w8-sym-g64; do
        cell vllm_server "$name/compressed-tensors" --python "$SERVER" --dtype float32 --runtime
    done
    cell vllm_server w4-asym-g64/compressed-tensors --python "$SERVER" --env QUANTFORGE_VLLM=prefer --runtime
    cell vllm_server w4-asym-g64/compressed-tensors --python "$WORK/vllm/bin/python" --dtype float16 --avx2-only
    cell vllm_server w4-asym-g64/compressed-tensors --python "$SERVER" --dtype float32 --avx2-only --runtime
    for name in w4-asym-g64/compressed-tensors w4-sym-g64/gptq w4-asym-g64/awq; do
        cell vllm_server "$name" --python "$SERVER" --dtype float16 --avx2-only
    done
}

run_llama-cpp() {
    local name
    for name in w4-sym-g32/gguf w8-sym-g32; do
        cell llama_cpp "$name" --node "$WORK/llama-cpp"
    done
}

"$PYTHON" scripts/make_smollm2.py "$MODEL" >&2
[ $# -gt 0 ] || set -- transformers gptqmodel vllm vllm-plugin llama-cpp
for server in "$@"; do
    case "$server" in
    transformers | gptqmodel | vllm | vllm-plugin | llama-cpp) "run_$server" ;;
    *) fail "no server is called $server; there are transformers, gptqmodel, vllm, vllm-plugin and llama-cpp" ;;
    esac
done

[ -e "$ROWS" ] || fail "there are no rows: QUANTFORGE_SERVERS_ONLY=${QUANTFORGE_SERVERS_ONLY:-*} is the name of no export"
"$PYTHON" scripts/servers/live_table.py "$ROWS"
cat >&2 <<TESTS

The rows are in $ROWS. The tests with these environments (leave out what was not made):

QUANTFORGE_SERVER_TRANSFORMERS=$WORK/transformers/bin/python QUANTFORGE_SERVER_GPTQMODEL=$WORK/gptqmodel/bin/python \\
QUANTFORGE_SERVER_VLLM=$WORK/vllm/bin/python QUANTFORGE_SERVER_VLLM_PLUGIN=$WORK/vllm-plugin/bin/python \\
QUANTFORGE_SERVER_LLAMA_CPP=$WORK/llama-cpp bash scripts/test.sh -m servers -n 0
TESTS
