"""Reasons to accept that a GB10 chooses another kernel than the GPU of the proofs."""

import re

NOTES = {
    r".* attention: FLASH_ATTN 3 / FLASH_ATTN 2": (
        "GPU tests ran version 3, which only Hopper supports; a GB10 supports only version 2"
    ),
    r".* (linear .*|LM head): .*Machete.* / .*Marlin.*": (
        "a GB10 has no Machete; GPU tests disable it (VLLM_DISABLED_KERNELS) and run Marlin"
    ),
    r".* (linear .*|experts): .*H(UMMING|umming).* / .*M(ARLIN|arlin).*": (
        "GPU tests ran Marlin, as recorded in their result files"
    ),
    r".* router: .* / plain GEMM": (
        "Hopper's router kernels do not support the GB10, which uses cuBLAS instead"
    ),
}


def find_note(choice: str, values: tuple[str, str]) -> str | None:
    difference = f"{choice}: {values[0]} / {values[1]}"
    return next((note for known, note in NOTES.items() if re.fullmatch(known, difference)), None)
