"""What ``python -m tests.fuzz --guided`` starts for each target: atheris (libFuzzer) looks for inputs that reach new code.

Half of its mutations are those of tests/fuzz/mutate.py, which know the formats. Inputs of findings are saved in FOLDER. Needs
``pip install -e '.[fuzz]'``.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckptd", "ckptd_client"]):
    from tests.fuzz.registry import TARGETS

from tests.fuzz.findings import SAVED_PER_KIND_MAX, save
from tests.fuzz.mutate import edit_bytes, mutant
from tests.fuzz.target import judge

INPUT_BYTES_MAX = 1 << 17
MEMORY_MIB_MAX = 4096


def main(name: str, seconds: int, folder: Path) -> None:
    target, kinds = TARGETS[name], Counter[str]()

    def one(data: bytes) -> None:
        finding = judge(target, data)
        if finding is not None:
            kinds[finding.kind] += 1
            if kinds[finding.kind] <= SAVED_PER_KIND_MAX:
                print(f"  {finding.kind}: {finding.text}\n    {save(target, finding, folder)}", flush=True)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        if chance.random() < 0.5:
            return mutant(target, chance)[:max_size]
        edited = bytearray(data)
        edit_bytes(edited, target, chance)
        return bytes(edited[:max_size])

    with tempfile.TemporaryDirectory(prefix="ckptd-fuzz-") as corpus:
        for index, sample in enumerate(target.valid):
            (Path(corpus) / str(index)).write_bytes(sample)
        options = [
            f"-max_total_time={seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-rss_limit_mb={MEMORY_MIB_MAX}",
        ]
        atheris.Setup(
            [sys.argv[0], *options, "-print_final_stats=1", f"-artifact_prefix={folder}/{name}-", corpus],
            one,
            custom_mutator=mutate,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
