"""Attention of block rows by Triton kernels: their anchor's context and their own block.

Who sees whom follows from two numbers of each anchor, so there is no mask in memory. A row of
anchor a sees the context slots from `context_start[a]` up to `anchors[a]`, and all rows of its own
block. Both bounds ascend along A in practice, which is what makes the kernels fast; any other order
is computed correctly, with more tiles.

The query heads of a group share keys and values. Their rows are put together, so that a tile of
rows spans few positions: the keys that only some of its rows see are few, and so are its own keys.
A tile is swept in two loops: where every row sees every key nothing is masked.

Backward, one kernel takes a tile of rows (gradient of queries, and on the way the sums of gradient
times output), another a tile of context slots with all rows that see it (gradients of their keys
and values), a small one a tile of own keys. Each gradient is written by one program, so that
results are the same every time. The programs that have most to do start first: in one document
those of late rows, and those of early slots.

Import this module only where it is used: triton is absent on some platforms.

Shapes: B sequence, S context slot, A anchor, G block position; T = A * G block rows; n query heads,
k heads of keys and values, R = n / k query heads of a group; d head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from dspark.attention import KeysValues, rows_side_by_side
from dspark.block_kernels import forward_kernel, keys_kernel, own_kernel, queries_kernel

_LOG2E = math.log2(math.e)


class Tiling(NamedTuple):
    """How a kernel is cut."""

    rows: int
    """Of a tile; the heads of a group count."""
    keys: int
    edge_keys: int
    """Of a tile where keys are masked; `keys` and `own` have none."""
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """Of the kernels."""

    forward: Tiling
    queries: Tiling
    keys: Tiling
    own: Tiling


TILINGS = {
    64: Tilings(
        Tiling(128, 64, 32, 4, 3),
        Tiling(64, 64, 32, 4, 3),
        Tiling(64, 64, 0, 4, 3),
        Tiling(32, 64, 0, 4, 3),
    ),
    128: Tilings(
        Tiling(128, 64, 32, 4, 2),
        Tiling(64, 64, 32, 4, 2),
        Tiling(64, 64, 0, 4, 2),
        Tiling(32, 64, 0, 4, 3),
    ),
    256: Tilings(
        Tiling(64, 64, 32, 4, 2),
        Tiling(64, 32, 32, 8, 2),
        Tiling(32, 64, 0, 8, 2),
        Tiling(32, 64, 0, 8, 2),
    ),
}
"""By head size, rounded up, of 16-bit types. Source: for 128 `benchmarks/block_attention.py` on an
H200; for 64 and 256 what the compiler reports for sm_90 (registers, spills, programs that fit)."""
SMALL_TILINGS = Tilings(*(Tiling(32, 32, 32, 4, 1),) * 4)
"""Of float32."""

_Bounds: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class ForwardPass:
    """The inputs of a call as kernels take them, and its sizes."""

    def __init__(
        self, queries: torch.Tensor, context: KeysValues, own: KeysValues, bounds: _Bounds
    ) -> None:
        self.batch, heads, self.rows, width = queries.shape
        self.kv_heads, self.slots = context[0].shape[1:3]
        self.anchors = bounds[0].shape[1]
        self.group, left = divmod(heads, self.kv_heads)
        assert not left, (heads, self.kv_heads)
        block_size, left = divmod(self.rows, self.anchors)
        assert not left, (self.rows, self.anchors)
        for tensor in context:
            assert tensor.shape == (self.batch, self.kv_heads, self.slots, width), tensor.shape
        for tensor in own:
            assert tensor.shape == (self.batch, self.kv_heads, self.rows, width), tensor.shape
        for tensor in bounds:
            assert tensor.shape == (self.batch, self.anchors), tensor.shape
        self.bounds = tuple(tensor.contiguous() for tensor in bounds)
        self.queries = _whole_rows(queries)
        context_rows = [_whole_rows(tensor) for tensor in context]
        self.context = [_strided(tensor) for tensor in context_rows]
        self.copied = all(map(_can_be_copied, context_rows))
        self._context_rows = context_rows
        self.own = [_strided(_whole_rows(tensor)) for tensor in own]
        self.tilings = _with_rows(pick_tilings(width, queries.dtype), self.group)
        self.scale = width**-0.5
        self.sizes = {
            "num_slots": self.slots,
            "num_rows": self.rows,
            "num_anchors": self.anchors,
            "num_batch": self.batch,
        }
        padded = max(16, triton.next_power_of_2(width))
        self.settings = {"G": block_size, "R": self.group, "WIDTH": width, "D": padded}

    def copied_context(self, tiling: Tiling) -> dict[str, Any]:
        """What a kernel is told that sweeps the context."""
        if not self.copied:
            return {"copied_k": None, "copied_v": None, "TMA": False}
        box = [1, tiling.keys, 1, self.settings["D"]]
        keys, values = (_descriptor(tensor, box) for tensor in self._context_rows)
        return {"copied_k": keys, "copied_v": values, "TMA": True}

    def row_tiles(self, tiling: Tiling) -> tuple[int, int]:
        """A grid with a program for each tile of rows."""
        tiles = triton.cdiv(self.rows, tiling.rows // self.group)
        return self.kv_heads, tiles * self.batch

    def key_tiles(self, num_keys: int, tiling: Tiling) -> tuple[int, int]:
        """A grid with a program for each tile of keys."""
        return self.kv_heads, triton.cdiv(num_keys, tiling.keys) * self.batch

    def of_rows(self) -> torch.Tensor:
        """float32 memory [B, k, T, R]."""
        shape = self.batch, self.kv_heads, self.rows, self.group
        return self.queries.new_empty(shape, dtype=torch.float32)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and log-sum-exp."""
        out, lse, tiling = rows_side_by_side(self.queries), self.of_rows(), self.tilings.forward
        forward_kernel[self.row_tiles(tiling)](
            _strided(self.queries),
            *self.context,
            *self.own,
            _strided(out),
            lse,
            start_ptr=self.bounds[0],
            end_ptr=self.bounds[1],
            **self.sizes,
            log2_scale=self.scale * _LOG2E,
            **self.copied_context(tiling),
            **self.settings,
            **_cut(tiling, edges=True),
        )
        return out, lse


class BackwardPass(ForwardPass):
    """The same with what the backward pass is told."""

    def __init__(
        self,
        grad_out: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *inputs: Any,
    ) -> None:
        super().__init__(*inputs)
        self.grad_out = _whole_rows(grad_out)
        self.out, self.lse = out, lse
        self.scales = {"scale": self.scale, "log2_scale": self.scale * _LOG2E}

    def backward(self) -> tuple[torch.Tensor, KeysValues, KeysValues]:
        """Gradients of the queries, of the context and of the own keys and values."""
        of_queries, delta = self.of_queries()
        return of_queries, self.of_context(delta), self.of_own(delta)

    def of_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient of the queries, and each row's sum of gradient times output."""
        delta = self.of_rows()
        gradient, tiling = rows_side_by_side(self.queries), self.tilings.queries
        queries_kernel[self.row_tiles(tiling)](
            _strided(self.queries),
            *self.context,
            *self.own,
            _strided(self.out),
            _strided(self.grad_out),
            _strided(gradient),
            self.lse,
            delta,
            start_ptr=self.bounds[0],
            end_ptr=self.bounds[1],
            **self.sizes,
            **self.scales,
            **self.copied_context(tiling),
            **self.settings,
            **_cut(tiling, edges=True),
        )
        return gradient, delta

    def of_context(self, delta: torch.Tensor) -> KeysValues:
        """Gradients of the context's keys and values."""
        slots = self.batch, self.slots, self.kv_heads, self.queries.shape[3]
        of_keys, of_values = (self.queries.new_empty(slots).transpose(1, 2) for _ in range(2))
        tiling = self.tilings.keys
        rows = self.queries, self.grad_out
        # Tiles have sizes of powers of two, and copies of numbers start every 16 bytes.
        group_fits = not self.group % 4 and not self.group & (self.group - 1)
        copied = group_fits and all(map(_can_be_copied, rows))
        if copied:
            box = [1, tiling.rows // self.group, self.group, self.settings["D"]]
            rows_of_tile = tuple(_descriptor(tensor, box) for tensor in rows)
            of_row = tuple(
                TensorDescriptor.from_tensor(tensor.view(-1), [tiling.rows])
                for tensor in (self.lse, delta)
            )
        else:
            rows_of_tile = tuple(map(_strided, rows))
            of_row = self.lse, delta
        keys_kernel[self.key_tiles(self.slots, tiling)](
            rows_of_tile[0],
            *self.context,
            rows_of_tile[1],
            _strided(of_keys),
            _strided(of_values),
            *of_row,
            start_ptr=self.bounds[0],
            end_ptr=self.bounds[1],
            **self.sizes,
            **self.scales,
            TMA=copied,
            **self.settings,
            **_cut(tiling),
        )
        return of_keys, of_values

    def of_own(self, delta: torch.Tensor) -> KeysValues:
        """Gradients of the own keys and values."""
        rows = self.batch, self.rows, self.kv_heads, self.queries.shape[3]
        of_keys, of_values = (self.queries.new_empty(rows).transpose(1, 2) for _ in range(2))
        tiling = self.tilings.own
        own_kernel[self.key_tiles(self.rows, tiling)](
            _strided(self.queries),
            *self.own,
            _strided(self.grad_out),
            _strided(of_keys),
            _strided(of_values),
            self.lse,
            delta,
            self.rows,
            self.batch,
            **self.scales,
            **self.settings,
            **_cut(tiling),
        )
        return of_keys, of_values


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can fetch tiles of a tensor [B, n, T, d]."""
    item = tensor.element_size()
    return (
        has_copy_engine(tensor.device)
        and tensor.data_ptr() % 16 == 0
        and all(stride > 0 and stride * item % 16 == 0 for stride in tensor.stride()[:3])
    )


def _descriptor(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Of a tensor [B, n, T, d], in the order [B, T, n, d]."""
    return TensorDescriptor.from_tensor(tensor.transpose(1, 2), box)


def has_copy_engine(device: torch.device) -> bool:
    """Whether kernels may use tensor descriptors: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pick_tilings(head_size: int, dtype: torch.dtype) -> Tilings:
    """How the kernels are cut for heads of this size."""
    if dtype == torch.float32 or head_size > max(TILINGS):
        return SMALL_TILINGS
    return next(TILINGS[size] for size in sorted(TILINGS) if size >= head_size)


def _with_rows(tilings: Tilings, group: int) -> Tilings:
    """The same with tiles of rows that hold all heads of a position."""
    least = triton.next_power_of_2(group)

    def fitting(tiling: Tiling) -> Tiling:
        return tiling._replace(rows=max(tiling.rows, least))

    return Tilings(*map(fitting, tilings))


def _cut(tiling: Tiling, *, edges: bool = False) -> dict[str, int]:
    cut = {"M": tiling.rows, "N": tiling.keys}
    if edges:
        cut["EDGE"] = tiling.edge_keys
    return {**cut, "num_warps": tiling.num_warps, "num_stages": tiling.num_stages}


def _strided(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A tensor [B, n, T, d] as kernels take it; d lies side by side."""
    batch, head, row, _ = tensor.stride()
    return tensor, batch, head, row


def _whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def forward(
    queries: torch.Tensor, context: KeysValues, own: KeysValues, bounds: _Bounds
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, n, T, d], and the base-2 log-sum-exp of each row, float32 [B, k, T, R].

    Args:
        queries: [B, n, T, d].
        context: keys and values, each [B, k, S, d].
        own: likewise [B, k, T, d].
        bounds: int64 [B, A], first slot and end of the context that an anchor's rows see.
    """
    return ForwardPass(queries, context, own, bounds).forward()


def backward(
    grad_out: torch.Tensor,
    queries: torch.Tensor,
    context: KeysValues,
    own: KeysValues,
    bounds: _Bounds,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, KeysValues, KeysValues]:
    """Gradients of the queries, of the context's keys and values, and of the own ones."""
    return BackwardPass(grad_out, out, lse, queries, context, own, bounds).backward()
