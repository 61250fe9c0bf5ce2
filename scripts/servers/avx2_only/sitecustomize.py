"""Has torch say that this processor has AVX2 and nothing newer. Python imports it at its start from PYTHONPATH.

vLLM chooses its compiled library, and kernels in it, by these functions. `vllm_server.py --avx2-only` puts this folder
into the environment of the server alone, with the variables that keep torch itself and our kernel to AVX2.
"""

import torch.cpu

for name in "avx512 avx512_bf16 vnni avx512_vnni amx_tile amx_fp16".split():
    if hasattr(torch.cpu, f"_is_{name}_supported"):
        setattr(torch.cpu, f"_is_{name}_supported", lambda: False)
