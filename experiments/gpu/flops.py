"""FLOPs and dtypes of convolutions and matrix products, as XLA:GPU writes them."""

import math
import re
from typing import Literal, NamedTuple

from experiments.gpu.hlo import Array, Computation, Instruction

CONVOLUTION_CALL = "__cudnn$conv"
PRODUCT_CALL = "__cublas"


class Product(NamedTuple):
    """A convolution or a matrix product.

    Attributes:
        kind: which of the two.
        dtype: of the operands, the wider one, as HLO names it; `tf32` for float32 that the tensor
            cores round, XLA's default, and `f32` for float32 at a higher precision.
        flops: multiplications and additions.
        weights: the operand that may be a param: a convolution's kernel, a product's right side.
        instruction: the instruction.
    """

    kind: Literal["convolution", "matrix product"]
    dtype: str
    flops: int
    weights: str | None
    instruction: Instruction


def find_product(instruction: Instruction, computation: Computation) -> Product | None:
    """Reads an instruction that is a convolution or a matrix product.

    Args:
        instruction: any instruction.
        computation: where it is.

    Returns:
        The product, None where it is neither.
    """
    arrays = [_array_of(computation, name) for name in instruction.operands[:2]]
    if len(arrays) < 2 or None in arrays or not instruction.arrays:
        return None
    left, right = (array for array in arrays if array is not None)
    result, target = instruction.arrays[0], instruction.target
    if instruction.opcode == "convolution" or (
        target.startswith(CONVOLUTION_CALL) and instruction.attribute(r"(dim_labels)=")
    ):
        kind, flops = "convolution", _convolution_flops(instruction, left, right, result)
    elif instruction.opcode in ("dot", "scaled-dot") or target.startswith(PRODUCT_CALL):
        kind, flops = "matrix product", 2 * result.size * _contracted(instruction, left)
    else:
        return None
    is_backward_filter = "BackwardFilter" in target
    weights = None if is_backward_filter else instruction.operands[1]
    return Product(kind, _dtype(instruction, left, right), flops, weights, instruction)


def _array_of(computation: Computation, name: str) -> Array | None:
    found = computation.instructions.get(name)
    return found.arrays[0] if found and found.arrays else None


def _dtype(instruction: Instruction, left: Array, right: Array) -> str:
    dtype = max(left, right, key=lambda array: Array(array.dtype, (1,)).num_bytes).dtype
    if dtype != "f32":
        return dtype
    precision = instruction.attribute(r'operand_precision"?[=:][{\[]([^}\]]*)[}\]]') or ""
    algorithm = instruction.attribute(r"\balgorithm=(\w+)") or ""
    is_exact = "highest" in precision.lower() or algorithm == "dot_f32_f32_f32"
    return "f32" if is_exact else "tf32"


def _convolution_flops(instruction: Instruction, left: Array, right: Array, result: Array) -> int:
    """Counts 2 for each output element and each kernel element that it meets, padding included.

    The calls of cuDNN name dimensions as in the forward convolution, whichever of the three arrays
    is their result.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    output, kernel = result, right
    if "BackwardFilter" in instruction.target:
        output, kernel = right, result
    elif "BackwardInput" in instruction.target:
        output, kernel = left, right
    kernel_flops = 2 * kernel.size // kernel.dims[labels[2].index("o")]
    # Of a dilated input, as of an input's gradient, only one element in so many is not zero.
    dilation = instruction.attribute(r"lhs_dilate=(\w+)") or "1"
    return output.size * kernel_flops // math.prod(int(step) for step in dilation.split("x"))


def _contracted(instruction: Instruction, left: Array) -> int:
    """Returns the product of the dimensions summed over."""
    dims = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or instruction.attribute(
        r'"lhs_contracting_dimensions":\[([^\]]*)\]'
    )
    return math.prod(left.dims[int(dim)] for dim in re.findall(r"\d+", dims or ""))
