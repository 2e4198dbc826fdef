"""The figures of compiled steps, side by side, for people."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

from experiments.gpu.messages import CompiledProgram, StepReport

REFERENCE = "float32"
"""The precision that others are compared with."""

_MAX_PARAMS = 3


def print_reports(console: Console, reports: Sequence[StepReport]) -> None:
    """Prints the step's figures, the update's, and the costliest kernels of each.

    Args:
        console: where to.
        reports: of the same step in several precisions.
    """
    tables = [_step_table(reports)]
    if any(report.update for report in reports):
        tables.append(_update_table(reports))
    for table in (*tables, *map(_costliest_table, reports)):
        console.print(table)
        console.print()


def warnings(report: StepReport) -> list[str]:
    """Writes a line for every source line with float32 products in a half-precision step.

    Args:
        report: the step.

    Returns:
        The lines; none for a float32 step.
    """
    return _wide_lines(report, asked_for=False)


def notes(report: StepReport) -> list[str]:
    """Writes such lines for products that the source asks for with a `precision` of their own.

    They are float32 on purpose. Where JAX's default precision has been set nothing tells them
    apart, and all are warnings.

    Args:
        report: the step.

    Returns:
        The lines, each with the share of the step's FLOPs.
    """
    return _wide_lines(report, asked_for=True)


def _wide_lines(report: StepReport, *, asked_for: bool) -> list[str]:
    if report.precision == REFERENCE:
        return []
    costs, lines = report.step.costs, []
    for wide in costs.wide_products:
        if asked_for != (wide.is_exact and report.default_precision is None):
            continue
        params = ", ".join(wide.params[:_MAX_PARAMS])
        params += f" and {len(wide.params) - _MAX_PARAMS} more" * (len(wide.params) > _MAX_PARAMS)
        name = f"{wide.kind}{'s' * (wide.count > 1)}"
        lines.append(
            f"{wide.count} {wide.dtype} {name} in the {report.precision} step, from {wide.source}"
            + f" ({params})" * bool(params)
            + f": asked for, {wide.flops / sum(costs.flops.values()):.1%} of the FLOPs" * asked_for
        )
    return lines


def _step_table(reports: Sequence[StepReport]) -> Table:
    table = _columns("the train step", reports)
    row = _Rows(table, [report.step for report in reports], reports)
    for kind in ("convolution", "matrix product"):
        for dtype in _keys(report.step.costs.products[kind] for report in reports):
            row(
                f"{kind}s, {dtype}",
                lambda step, kind=kind, dtype=dtype: step.costs.products[kind].get(dtype, 0),
            )
    table.add_section()
    row("kernels", lambda step: step.costs.kernels, compared=True)
    for kind in _keys(report.step.costs.kernels_by_kind for report in reports):
        row(f"  {kind}", lambda step, kind=kind: step.costs.kernels_by_kind.get(kind, 0))
    table.add_section()
    row("GB at kernel boundaries", lambda step: step.costs.num_bytes / 1e9, compared=True)
    for kind in _keys(report.step.costs.bytes_by_kind for report in reports):
        row(f"  {kind}", lambda step, kind=kind: step.costs.bytes_by_kind.get(kind, 0) / 1e9)
    for dtype in _keys(report.step.costs.flops for report in reports):
        row(f"TFLOP, {dtype}", lambda step, dtype=dtype: step.costs.flops.get(dtype, 0) / 1e12)
    row("roofline bound, ms", lambda step: 1e3 * step.costs.bound_seconds, compared=True)
    row("  of it limited by memory, %", lambda step: 100 * step.costs.memory_bound_share)
    row("  of it limited by compute, %", lambda step: 100 * (1 - step.costs.memory_bound_share))
    table.add_section()
    row("GB of arguments", lambda step: step.argument_bytes / 1e9, compared=True)
    row("GB of temporaries", lambda step: step.temporary_bytes / 1e9, compared=True)
    row("GB at the peak", lambda step: step.peak_bytes / 1e9, compared=True)
    row("s to compile", lambda step: step.compile_seconds)
    return table


def _update_table(reports: Sequence[StepReport]) -> Table:
    table = _columns("the optimizer's update alone", reports)
    updates = [report.update for report in reports]
    row = _Rows(table, updates, reports)
    params, leaves = reports[0].num_params, reports[0].num_leaves
    row("bytes a param", lambda update: update.costs.num_bytes / params, compared=True)
    row("temporary bytes a param", lambda update: update.temporary_bytes / params)
    row("kernels", lambda update: update.costs.kernels, compared=True)
    row(f"kernels a leaf, of {leaves}", lambda update: update.costs.kernels / leaves)
    row("s to compile", lambda update: update.compile_seconds)
    return table


def _costliest_table(report: StepReport) -> Table:
    table = Table(
        title=f"the costliest kernels of the {report.precision} step",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("bound, us", "MB", "GFLOP"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("kind", "result", "from"):
        table.add_column(heading, overflow="fold")
    for kernel in report.step.costs.costliest:
        table.add_row(
            f"{1e6 * kernel.seconds:.0f}",
            f"{kernel.num_bytes / 1e6:,.0f}",
            f"{kernel.flops / 1e9:,.0f}" if kernel.flops else "",
            f"{kernel.kind} {kernel.dtype}".strip(),
            kernel.result,
            kernel.source,
        )
    return table


def _columns(title: str, reports: Sequence[StepReport]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(report.precision, justify="right", no_wrap=True)
    for precision in _compared(reports):
        table.add_column(f"{precision} / {REFERENCE}", justify="right", no_wrap=True)
    return table


def _compared(reports: Sequence[StepReport]) -> list[str]:
    precisions = [report.precision for report in reports]
    return [name for name in precisions if name != REFERENCE] if REFERENCE in precisions else []


class _Rows:
    """Adds rows of one figure in all precisions, with the ratios to float32."""

    def __init__(
        self,
        table: Table,
        programs: Sequence[CompiledProgram | None],
        reports: Sequence[StepReport],
    ) -> None:
        self._table = table
        self._programs = dict(zip((report.precision for report in reports), programs, strict=True))
        self._compared = _compared(reports)

    def __call__(
        self,
        label: str,
        figure: Callable[[CompiledProgram], float],
        *,
        compared: bool = False,
    ) -> None:
        values = {
            name: figure(program) for name, program in self._programs.items() if program is not None
        }
        reference = values.get(REFERENCE)
        cells: list[RenderableType] = [_figure(values.get(name)) for name in self._programs]
        for name in self._compared:
            value = values.get(name) if compared else None
            cells.append(f"{value / reference:.3f}" if value is not None and reference else "")
        self._table.add_row(label, *cells)


def _keys(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _figure(value: float | None) -> str:
    """Writes counts in full, and at least three digits of everything else."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3 if value else 1
    return f"{value:,.{digits}f}"
