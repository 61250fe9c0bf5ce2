"""Kill a quantization with SIGKILL at random moments, rerun it each time, and compare the output byte by byte.

    python scripts/kill_and_resume.py MODEL --text FILE --work DIR [--kills 10] [--nsamples 8]

First an undisturbed run is made and timed; then a second one is killed `kills` times, each a random share of that time
after its start (seeded), and finally carried through. Prints the files compared and exits 1 on any difference.
"""

import argparse
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def digests(directory: Path) -> dict[str, str]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nsamples", default="8")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)

    def command(name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "quantforge", "quantize", args.model, "--output", str(args.work / name)),
            *("--group-size", "64", "--dataset", args.text, "--nsamples", args.nsamples, "--quiet"),
            *("--format", "compressed-tensors,gptq"),
        ]

    started = time.monotonic()
    subprocess.run(command("undisturbed"), check=True, stdout=subprocess.DEVNULL)
    whole_seconds = time.monotonic() - started
    print(f"undisturbed: {whole_seconds:.0f} s", flush=True)
    moments = random.Random(args.seed)
    partial = args.work / "killed.partial"
    kills = 0
    while kills < args.kills:
        process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL)
        wait = moments.uniform(0.05, 0.6) * whole_seconds
        try:
            process.wait(timeout=wait)
            print(f"finished before the next kill, after {kills} kills; starting over")
            assert process.returncode == 0
            if digests(args.work / "killed") != digests(args.work / "undisturbed"):
                sys.exit("the outputs differ")
            shutil.rmtree(args.work / "killed")
            continue
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kills += 1
        layers = len(list(partial.glob("layer-*.json")))
        print(f"kill {kills} after {wait:.1f} s: {layers} layers committed", flush=True)
    subprocess.run(command("killed"), check=True, stdout=subprocess.DEVNULL)
    before, after = digests(args.work / "undisturbed"), digests(args.work / "killed")
    if before != after:
        sys.exit(
            f"the outputs differ: {sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))}"
        )
    print(f"{len(before)} files, byte-identical after {kills} kills")


if __name__ == "__main__":
    main()
