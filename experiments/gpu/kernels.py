"""The kernels of a compiled program: how often each runs, what it is and what it moves."""

import dataclasses
from collections.abc import Iterator

from experiments.gpu.flops import Product, find_product
from experiments.gpu.hlo import Computation, Instruction, Module

# What costs nothing when the program runs.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain")
    + ("partition-id", "replica-id", "opt-barrier", "add-dependency")
)
_MOVES = frozenset(("copy", "transpose", "reshape", "pad", "slice", "concatenate", "reverse"))
_CASTS = frozenset(("convert", "broadcast", "reshape"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
COLLECTIVES = frozenset(
    ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    + ("collective-broadcast", "ragged-all-to-all", "send", "recv")
)

CONVERT = "convert alone"
_FUSIONS = {"kLoop": "element-wise fusion", "kInput": "reduction or transpose fusion"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch, or several of the same in a loop.

    Attributes:
        instruction: what it is in the program.
        computation: where that is.
        kind: for people.
        count: how often it runs.
        bytes_read: bytes of its operands, each time.
        bytes_written: bytes of its results, each time.
        products: its convolutions and matrix products.
    """

    instruction: Instruction
    computation: Computation
    kind: str
    count: int
    bytes_read: int
    bytes_written: int
    products: tuple[Product, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes read and written, each time."""
        return self.bytes_read + self.bytes_written


def list_kernels(module: Module) -> list[Kernel]:
    """Lists what a program runs.

    A loop counts as often as XLA knows that it turns, once where it does not; of the branches of
    a conditional the one that moves the most counts.

    Args:
        module: the program.

    Returns:
        The kernels, in the order of the program.
    """
    return list(_walk(module, module.entry, 1))


def _walk(module: Module, name: str, count: int) -> Iterator[Kernel]:
    computation = module.computations[name]
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        # An asynchronous operation is its start; its end, which has the result, costs nothing.
        base = opcode.removesuffix("-start")
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            continue
        if base in ("call", "async"):
            for called in instruction.calls("to_apply", "calls", "called_computations"):
                yield from _walk(module, called, count)
        elif opcode == "while":
            turns = instruction.attribute(r'known_trip_count":\{"n":"(\d+)"')
            for called in instruction.calls("body"):
                yield from _walk(module, called, count * int(turns or 1))
            if turns is None:  # otherwise the host counts
                for called in instruction.calls("condition"):
                    yield from _walk(module, called, count)
        elif opcode == "conditional":
            names = instruction.calls(
                "branch_computations", "true_computation", "false_computation"
            )
            branches = [list(_walk(module, called, count)) for called in names]
            yield from max(branches, key=_total_bytes, default=[])
        else:
            yield _kernel(module, computation, instruction, base, count)


def _total_bytes(kernels: list[Kernel]) -> int:
    return sum(kernel.num_bytes * kernel.count for kernel in kernels)


def _kernel(
    module: Module, computation: Computation, instruction: Instruction, base: str, count: int
) -> Kernel:
    operands = computation.operands(instruction)
    if base != instruction.opcode:  # the result is that of the end
        ends = computation.users(instruction.name)
        written = ends[0].num_bytes if ends else instruction.num_bytes
    else:
        written = instruction.num_bytes
    read = sum(operand.num_bytes for operand in operands)
    if base == "fusion":
        inner = module.computations[instruction.calls("calls")[0]]
        read, written = _fusion_traffic(inner, read, written)
        products = [
            product
            for inside in inner.instructions.values()
            if (product := find_product(inside, inner))
        ]
    else:
        product = find_product(instruction, computation)
        products = [product] if product else []
        if base in _SLICES:
            read = min(read, written + sum(operand.num_bytes for operand in operands[1:]))
        inner = None
    kind = _kind(instruction, base, inner, products)
    return Kernel(instruction, computation, kind, count, read, written, tuple(products))


def _kind(
    instruction: Instruction, base: str, inner: Computation | None, products: list[Product]
) -> str:
    if products:
        return products[0].kind
    if base in COLLECTIVES:
        return "collective"
    done = {base} if inner is None else {i.opcode for i in inner.instructions.values()} - _FREE
    if "convert" in done and done <= _CASTS:
        return CONVERT
    if done and done <= _MOVES | {"convert", "broadcast"}:
        return "copy or transpose"
    if inner is not None:
        return _FUSIONS.get(instruction.attribute(r"kind=(\w+)") or "", "custom fusion")
    return instruction.target or base


def _fusion_traffic(inner: Computation, read: int, written: int) -> tuple[int, int]:
    """Corrects the bytes of a fusion that slices an operand or updates one in place.

    Such a fusion touches only the slice. Without this, a gather of a batch would count the whole
    set, and the write of one row of a log the log.
    """
    for parameter in inner.instructions.values():
        if parameter.opcode != "parameter":
            continue
        uses = list(_uses(inner, parameter.name))
        updated = [user for user, operand in uses if _updates(inner, user, operand)]
        rest = [use for use in uses if use[0] not in updated]
        if all(user.opcode in _SLICES and user.operands[0] == name for user, name in rest):
            touched = sum(user.num_bytes for user, _ in rest)
            read -= max(parameter.num_bytes - touched, 0)
        for user in updated:
            update = inner.instructions[user.operands[1]]
            written -= user.num_bytes - update.num_bytes
    return read, written


def _uses(inner: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Yields the users of a value with the operand they use, past what only renames it."""
    for user in inner.users(name):
        if user.opcode == "bitcast":
            yield from _uses(inner, user.name)
        else:
            yield user, name


def _updates(inner: Computation, user: Instruction, operand: str) -> bool:
    """Tells whether a user is an update in place that is a result of the fusion."""
    if user.opcode != "dynamic-update-slice" or user.operands[0] != operand:
        return False
    outs = [out for out, _ in _uses(inner, user.name)]
    return inner.root == user.name or all(out.opcode == "tuple" for out in outs)
