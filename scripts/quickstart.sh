#!/usr/bin/env bash
# From nothing to a verified 4-bit model and what it cost: environment, the real SmolLM2-135M-Instruct, quantize, verify,
# evaluate against the original, and a sample of text. Nothing is downloaded but Python packages.
#
#   QUANTFORGE_OUT        where the models go (default: quickstart-out in the repository)
#   QUANTFORGE_EVAL_TEXT  text to evaluate on (default: WikiText-2's test text where it is found, else see below)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh

OUT="${QUANTFORGE_OUT:-$ROOT/quickstart-out}"
MODEL="$OUT/SmolLM2-135M-Instruct"
QUANTIZED="$OUT/SmolLM2-135M-Instruct-w4g64-gptq"
TEXT="${QUANTFORGE_EVAL_TEXT:-$ROOT/../shared/data/wikitext-2-raw/wiki.test.raw}"
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 TQDM_DISABLE=1

step() {
    printf '\n== %s (%s s so far)\n' "$1" "$SECONDS"
}

step "the original model: $MODEL"
"$PYTHON" scripts/make_smollm2.py "$MODEL"

step "quantize to 4 bits, group 64, and verify by reading the files back"
quantforge quantize "$MODEL" --bits 4 --group-size 64 --nsamples 32 --seqlen 512 --output "$QUANTIZED" --json >"$OUT/quantize.json"

if [ -f "$TEXT" ]; then
    SAID="$(basename "$TEXT")"
elif [ -n "${QUANTFORGE_EVAL_TEXT:-}" ]; then
    fail "QUANTFORGE_EVAL_TEXT=$TEXT is not a file"
else
    TEXT="$OUT/stdlib-docstrings.txt"
    SAID="docstrings of Python's standard library (set QUANTFORGE_EVAL_TEXT for a usual text, such as wiki.test.raw)"
    "$PYTHON" scripts/stdlib_text.py "$TEXT"
fi
step "evaluate both on 4 windows of 2048 tokens of $SAID"
quantforge eval "$QUANTIZED" --reference "$MODEL" --text "$TEXT" --windows 4 --json >"$OUT/eval.json"

step "what the quantized model writes, loaded by transformers and compressed-tensors alone"
"$PYTHON" scripts/sample_text.py "$QUANTIZED"

step "result"
"$PYTHON" scripts/quickstart_table.py "$OUT/quantize.json" "$OUT/eval.json"
echo "evaluated on: $SAID"
echo "done in $SECONDS s; the quantized model is in $QUANTIZED"
