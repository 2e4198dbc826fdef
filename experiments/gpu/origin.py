"""Where an instruction comes from: the source line and the params that XLA recorded for it."""

import dataclasses
import os
import re

from experiments.gpu.hlo import Computation, Instruction, Module

# Instructions that hand on an array with other words for it.
_PASSING = ("bitcast", "copy", "transpose", "convert", "reshape", "get-tuple-element")
_LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python")


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of Python; `function` is empty where XLA has not recorded it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Writes it with a path relative to the working directory where it lies there."""
        path = os.path.relpath(self.file)
        path = self.file if path.startswith(os.pardir) else path
        return f"{path}:{self.line}" + (f" in {self.function}" if self.function else "")


class Origins:
    """The sources of a module's instructions.

    Newer modules have tables of files and stack frames before the computations, older ones the
    file and line in each instruction.

    Args:
        module: the module.
    """

    def __init__(self, module: Module) -> None:
        """Reads the tables."""
        entry = module.computations[module.entry]
        self._entry = entry
        self._module = module
        files = _string_table(module.text, "FileNames")
        functions = _string_table(module.text, "FunctionNames")
        self._locations = {
            key: Frame(
                files.get(row.get("file_name_id", 0), ""),
                row.get("line", 0),
                functions.get(row.get("function_name_id", 0), ""),
            )
            for key, row in _number_table(module.text, "FileLocations").items()
        }
        self._frames = _number_table(module.text, "StackFrames")
        # Seen with jaxlib 0.12.0: each parent is printed one too high, the first its own parent.
        frames = self._frames.items()
        self._shift = int(any(row.get("parent_frame_id") == key for key, row in frames))

    def stack(self, instruction: Instruction) -> list[Frame]:
        """Returns the lines that led to an instruction, the innermost first."""
        file = instruction.attribute(r'source_file="([^"]*)"')
        if file is not None:
            return [Frame(file, int(instruction.attribute(r"source_line=(\d+)") or 0), "")]
        frames = []
        key = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        seen = set()
        while key in self._frames and key not in seen:
            seen.add(key)
            location = self._locations.get(self._frames[key].get("file_location_id", 0))
            frames += [location] if location else []
            key = self._frames[key].get("parent_frame_id", 0) - self._shift
        return frames

    def source(self, instruction: Instruction) -> str:
        """Returns the innermost line that is not a library's, e.g. `resnet.py:95 in f`.

        Where all are, the innermost. A fusion that XLA has recorded no line for has the last of
        its instructions'; where none has one, the name of the operation.
        """
        stack = self.stack(instruction)
        for called in instruction.calls("calls") if not stack else ():
            for inner in reversed(self._module.computations[called].instructions.values()):
                stack = stack or self.stack(inner)
        own = [frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)]
        return str((own or stack)[0]) if stack else _op_name(instruction)

    def argument(self, computation: Computation, name: str) -> str | None:
        """Follows a value back to an argument of the program.

        Args:
            computation: where the value is.
            name: its instruction.

        Returns:
            The argument's name as JAX writes it, e.g. `params['head']['kernel']`; None where the
            value is computed from anything but one argument.
        """
        if computation is not self._entry:
            return None
        while True:
            instruction = computation.instructions.get(name)
            if instruction is None:
                return None
            if instruction.opcode == "parameter":
                return _op_name(instruction)
            is_renaming = instruction.opcode in _PASSING or (
                instruction.opcode == "fusion" and self._is_passing(instruction)
            )
            operands = dict.fromkeys(instruction.operands)
            if not is_renaming or len(operands) != 1:
                return None
            name = next(iter(operands))

    def _is_passing(self, fusion: Instruction) -> bool:
        """Tells whether a fusion only moves or casts its operands."""
        called = self._module.computations[fusion.calls("calls")[0]]
        return all(
            inner.opcode in (*_PASSING, "parameter", "tuple", "pad", "constant")
            for inner in called.instructions.values()
        )


def _op_name(instruction: Instruction) -> str:
    name = instruction.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or instruction.name
    return name.replace("\\'", "'").replace('\\"', '"')


def _rows(text: str, title: str) -> list[tuple[int, str]]:
    match = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    lines = match[1].splitlines() if match else []
    return [(int(key), row) for key, row in (line.split(" ", 1) for line in lines)]


def _string_table(text: str, title: str) -> dict[int, str]:
    return {key: row.strip('"') for key, row in _rows(text, title)}


def _number_table(text: str, title: str) -> dict[int, dict[str, int]]:
    return {
        key: {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
        for key, row in _rows(text, title)
    }
