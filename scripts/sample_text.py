"""Let a checkpoint answer one question, loaded by plain transformers: nothing of quantforge is imported.

python scripts/sample_text.py CHECKPOINT [QUESTION]
"""

import sys
import textwrap

TOKENS = 40


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python scripts/sample_text.py CHECKPOINT [QUESTION]")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = sys.argv[1]
    question = sys.argv[2] if len(sys.argv) == 3 else "Explain in two sentences why the sky is blue."
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"> {question}")
    print(textwrap.fill(answer.strip(), width=100))


if __name__ == "__main__":
    main()
