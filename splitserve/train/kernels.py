"""The float32 side of an optimizer step on a GPU: sums of gradients, and AdamW, a launch each.

Every number passes through the chip once. torch reads and writes a bfloat16 gradient's float32
copy on its way to the sum, and the gradients once more to scale them down to the largest norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SUM_BLOCK = 2048
ADAMW_BLOCK = 1024


def add_gradients(
    total_n: torch.Tensor, first_n: torch.Tensor, second_n: torch.Tensor | None, *, fresh: bool
) -> None:
    """`total + first + second`, from left to right, into `total`, float32.

    Args:
        first_n, second_n: gradients of any float type, contiguous; the second may be missing.
        fresh: what `total` holds is not read, as if it were 0.
    """
    assert first_n.is_contiguous() and (second_n is None or second_n.is_contiguous())
    number = total_n.numel()
    _add_gradients[(triton.cdiv(number, SUM_BLOCK),)](
        total_n, first_n, second_n, number, FRESH=fresh, BLOCK=SUM_BLOCK
    )


def adamw(
    weights_n: torch.Tensor,
    masters_n: torch.Tensor,
    gradients_n: torch.Tensor,
    means_n: torch.Tensor,
    squares_n: torch.Tensor,
    factors_4: torch.Tensor,
    *,
    decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step of AdamW: masters, moments and the weights, which are the masters in their own type.

    Args:
        masters_n, gradients_n, means_n, squares_n: float32, on the device as all the others.
        factors_4: float32: of the gradients; the learning rate over the means' bias; one over the
            root of the squares' bias; and 0 where nothing is to change.
        decay: of the masters, the learning rate times the weight decay.
    """
    number = masters_n.numel()
    _adamw[(triton.cdiv(number, ADAMW_BLOCK),)](
        weights_n,
        masters_n,
        gradients_n,
        means_n,
        squares_n,
        factors_4,
        number,
        decay,
        1.0 - betas[0],
        betas[1],
        1.0 - betas[1],
        eps,
        BLOCK=ADAMW_BLOCK,
    )


# A program's last numbers go through a branch of their own: with a mask, wherever their number is
# no multiple of 16, all programs would load and store one number at a time.
@triton.jit(do_not_specialize=["number"])
def _add_gradients(total, first, second, number, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    if start + BLOCK <= number:
        _add_block(total, first, second, start, lanes, None, FRESH)
    else:
        _add_block(total, first, second, start, lanes, lanes < number - start, FRESH)


@triton.jit
def _add_block(total, first, second, start, lanes, inside, FRESH: tl.constexpr):
    summed = tl.load(first + start + lanes, mask=inside).to(tl.float32)
    if not FRESH:
        summed = tl.load(total + start + lanes, mask=inside) + summed
    if second is not None:
        summed += tl.load(second + start + lanes, mask=inside).to(tl.float32)
    tl.store(total + start + lanes, summed, mask=inside)


@triton.jit(do_not_specialize=["number"])
def _adamw(
    weights,
    masters,
    gradients,
    means,
    squares,
    factors,
    number,
    decay,
    rate1,
    beta2,
    rate2,
    eps,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    if tl.load(factors + 3) != 0.0:
        weights, masters, gradients = weights + start, masters + start, gradients + start
        means, squares = means + start, squares + start
        numbers = (factors, decay, rate1, beta2, rate2, eps)
        if start + BLOCK <= number:
            _adamw_block(weights, masters, gradients, means, squares, numbers, lanes, None)
        else:
            inside = lanes < number - start
            _adamw_block(weights, masters, gradients, means, squares, numbers, lanes, inside)


@triton.jit
def _adamw_block(weights, masters, gradients, means, squares, numbers, lanes, inside):
    factors, decay, rate1, beta2, rate2, eps = numbers
    gradient = tl.load(gradients + lanes, mask=inside) * tl.load(factors)
    mean = tl.load(means + lanes, mask=inside)
    square = tl.load(squares + lanes, mask=inside)
    master = tl.load(masters + lanes, mask=inside)
    mean += (gradient - mean) * rate1
    square = square * beta2 + gradient * gradient * rate2
    root = tl.sqrt(square) * tl.load(factors + 2) + eps
    master = master - master * decay - tl.load(factors + 1) * mean / root
    tl.store(means + lanes, mean, mask=inside)
    tl.store(squares + lanes, square, mask=inside)
    tl.store(masters + lanes, master, mask=inside)
    tl.store(weights + lanes, master.to(weights.dtype.element_ty), mask=inside)
