"""Reads tensors of a ckptd checkpoint (docs/FORMAT.md, version 2) with numpy and json; checks places, no sums (`ckptd verify`).
    python read_checkpoint.py ROOT/UID/NAME/epoch-NNNNNN/step-NNNNNNNNNN [KEY [RANK]]
"""

import json
import sys
from pathlib import Path

import numpy as np

# safetensors' names; what numpy has no type for comes as raw numbers of its size, BF16 as the float32 that it is the upper half of.
TYPES = {"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "U32": "<u4"}
TYPES |= {"F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8"}
TYPES |= dict.fromkeys(["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"], "u1")


class Checkpoint:
    def __init__(self, directory):
        self.directory = Path(directory).resolve()
        self.manifest = json.loads((self.directory / "manifest.json").read_bytes())
        if (self.manifest["format"], self.manifest["version"]) != ("ckptd-checkpoint", 2):
            raise ValueError(f"{directory}: not a ckptd checkpoint of version 2")
        data = (self.directory / self.manifest["index"]["path"]).read_bytes()
        self.columns = {name: np.frombuffer(data, kind, rows, at) for name, kind, at, rows in self.manifest["index"]["columns"]}
        self.codec = self.columns.get("codec", np.zeros(len(self.columns["tensor"]), "u1"))
        dims, tensor = self.columns["dims"], self.columns["tensor"]
        self.first = np.searchsorted(tensor, np.arange(len(dims) + 1))  # of each tensor's chunks, and the end
        self.shape_at = np.concatenate(([0], np.cumsum(dims, dtype=np.int64)))  # of each tensor's part of `shape`,
        self.box_at = np.concatenate(([0], np.cumsum(dims[tensor], dtype=np.int64)))  # of each chunk's of `offsets` and `sizes`
        owners = [int(rank) - 1 if rank else None for rank in self.columns["rank"]]
        self.tensors = {name: at for at, name in enumerate(zip(self.manifest["names"]["keys"], owners, strict=True))}

    def find(self, key, rank=None):
        """The number of a tensor; of one that each rank has for itself, name the rank."""
        key = self.manifest["aliases"].get(key, key)
        if not {(key, None), (key, rank)} & self.tensors.keys():
            raise KeyError(f"no tensor {key}" + ("" if rank is None else f" of rank {rank}"))
        return self.tensors.get((key, None), self.tensors.get((key, rank)))

    def facts(self, at):  # (dtype, shape)
        shape = self.columns["shape"][self.shape_at[at] : self.shape_at[at + 1]]
        return self.manifest["names"]["dtypes"][self.columns["dtype"][at]], tuple(map(int, shape))

    def read(self, key, rank=None, box=None):
        """A tensor, or of it the box (offsets, sizes); only the chunks that meet it are read."""
        at = self.find(key, rank)
        dtype, shape = self.facts(at)
        offsets, sizes = box or ((0,) * len(shape), shape)
        whole, missing = np.empty(sizes, TYPES[dtype]), int(np.prod(sizes))
        for row in range(self.first[at], self.first[at + 1]):
            place = slice(self.box_at[row], self.box_at[row + 1])
            its_offsets, its_sizes = self.columns["offsets"][place].tolist(), self.columns["sizes"][place].tolist()
            begin = [max(pair) for pair in zip(offsets, its_offsets, strict=True)]
            stop = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, its_offsets, its_sizes, strict=True)]
            if any(low >= high for low, high in zip(begin, stop, strict=True)):
                continue
            chunk = self.chunk(row, TYPES[dtype], its_sizes)
            part = chunk[tuple(slice(a - o, b - o) for a, b, o in zip(begin, stop, its_offsets, strict=True))]
            whole[tuple(slice(a - o, b - o) for a, b, o in zip(begin, stop, offsets, strict=True))] = part
            missing -= part.size
        if missing:
            raise ValueError(f"{key}: {missing} elements are in no chunk")
        return (whole.astype("<u4") << 16).view("<f4") if dtype == "BF16" else whole

    def chunk(self, row, kind, sizes):
        """A box of a tensor as it lies in its file, mapped."""
        facts = self.manifest["files"][self.columns["file"][row]]
        path, of = self.directory / facts["path"], facts.get("of")
        if of:  # it did not change since another checkpoint of the job
            path = self.directory.parents[1] / f"epoch-{of['epoch']:06d}" / f"step-{of['step']:010d}" / facts["path"]
        if path.stat().st_size != facts["size"]:
            raise ValueError(f"{path}: {path.stat().st_size} bytes instead of {facts['size']}")
        if self.codec[row] > 2:
            raise ValueError(f"{path}: chunks of a kind that this reader does not know (`ckptd export` does)")
        at, nbytes = int(self.columns["at"][row]), int(self.columns["nbytes"][row])
        if not self.codec[row]:
            return np.memmap(path, kind, "r", at, tuple(sizes))
        if self.codec[row] == 2:
            return dequantised(np.fromfile(path, "u1", nbytes, offset=at), kind, sizes)
        import zstandard  # `pip install zstandard`: this one was compressed
        shuffled = zstandard.ZstdDecompressor().decompress(np.memmap(path, "u1", "r", at, nbytes))
        rows = np.frombuffer(shuffled, "u1").reshape(np.dtype(kind).itemsize, -1)
        return np.ascontiguousarray(rows.T).view(kind).reshape(sizes)


def dequantised(data, kind, sizes):
    """Rows of a smallest value, a step, and numbers of a few bits: float32, or the numbers of BF16."""
    rows, bits = int(np.prod(sizes[:-1])), int(data[0])
    low, step = data[4 : 4 + 8 * rows].view("<f4").reshape(2, rows, 1)
    spread = np.unpackbits(data[4 + 8 * rows :].reshape(rows, -1), 1, sizes[-1] * bits, "little").reshape(rows, -1, bits)
    raw = (low + step * np.packbits(spread, 2, "little")[..., 0].astype("<f4")).reshape(sizes).view("<u4")
    return (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16 if kind == TYPES["BF16"] else raw.view("<f4")


if __name__ == "__main__":
    checkpoint = Checkpoint(sys.argv[1])
    if sys.argv[2:]:
        sys.exit(print(checkpoint.read(sys.argv[2], *map(int, sys.argv[3:]))))
    for (name, owner), number in checkpoint.tensors.items():
        print(name, *checkpoint.facts(number), "" if owner is None else f"rank {owner}")
