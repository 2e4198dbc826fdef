"""Reads the text of a compiled HLO module: its computations, instructions and shapes."""

import dataclasses
import math
import re

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16}
_SHAPE = re.compile(r"\b([a-z]+[a-z0-9]*)\[([0-9,<=]*)\]")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+)\s*\(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-~]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """Dtype, as HLO names it, and dimensions of an array."""

    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        """Writes it as HLO does, e.g. `f16[8,64]`."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory; dtypes below 8 bits are packed."""
        return -(-self.size * _bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: unique in its module.
        arrays: the arrays of its result, those of a tuple one after the other.
        opcode: as in the text, e.g. `fusion` or `all-reduce-start`.
        operands: names, as written.
        attributes: the text after the operands.
        index: the number of a parameter, -1 for everything else.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    index: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    def attribute(self, pattern: str) -> str | None:
        """Returns the first group of a regular expression in the attributes, None without one."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def calls(self, *keys: str) -> list[str]:
        """Returns the computations that attributes of these names call, e.g. `body`."""
        found = []
        for key in keys:
            for braces, name in re.findall(
                rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-~]+))", self.attributes
            ):
                found += _NAME.findall(braces) if braces else [name]
        return found

    @property
    def target(self) -> str:
        """What a custom call calls, empty for everything else."""
        return self.attribute(r'custom_call_target="([^"]*)"') or ""


@dataclasses.dataclass
class Computation:
    """A list of instructions, in the order in which they run.

    Attributes:
        instructions: by name.
        root: the name of the one that is the result.
    """

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: str = ""

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that one reads, each once."""
        names = dict.fromkeys(instruction.operands)
        return [self.instructions[name] for name in names if name in self.instructions]

    def users(self, name: str) -> list[Instruction]:
        """Returns the instructions that read one."""
        return [user for user in self.instructions.values() if name in user.operands]


@dataclasses.dataclass
class Module:
    """A compiled program.

    Attributes:
        computations: by name.
        entry: the name of the one that is run.
        text: what it was read from.
    """

    computations: dict[str, Computation]
    entry: str
    text: str


def parse_module(text: str) -> Module:
    """Reads a module.

    Args:
        text: as `jax.stages.Compiled.as_text` gives it.

    Returns:
        The module.

    Raises:
        ValueError: where the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            current = None
            if header:
                current = computations[header[2]] = Computation()
                entry = header[2] if header[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            instruction = _parse_instruction(match[2], match[3])
            if instruction is not None:
                current.instructions[instruction.name] = instruction
                current.root = instruction.name if match[1] else current.root
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is not an HLO module.")
    return Module(computations, entry, text)


def parse_arrays(text: str) -> tuple[Array, ...]:
    """Reads the arrays of a shape, however deep its tuples are.

    Args:
        text: a shape with or without layouts, e.g. `(f16[8,64]{1,0}, (u8[0]{0}, token[]))`.

    Returns:
        The arrays. A dimension of dynamic size counts with its bound.
    """
    return tuple(
        Array(dtype, tuple(int(dim.strip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _SHAPE.findall(text)
    )


def _parse_instruction(name: str, text: str) -> Instruction | None:
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    inner = text[opcode.end() : close - 1]
    is_parameter = opcode[1] == "parameter"
    return Instruction(
        name=name,
        arrays=parse_arrays(text[:end]),
        opcode=opcode[1],
        operands=tuple(_NAME.findall(inner)),
        attributes=text[close:],
        index=int(inner) if is_parameter else -1,
    )


def _closing(text: str, start: int) -> int:
    """Returns the place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def _bits(dtype: str) -> int:
    """Returns the bits of an element: f8e4m3fn has 8, s4 has 4, c64 has 64."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+([0-9]+)", dtype)
    return int(digits[1]) if digits else 0
