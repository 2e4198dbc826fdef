"""The report of a comparison: numbers to the digit, verdicts in words, files that stand alone."""

import dataclasses
import html
import html.parser
import re

import numpy as np
import pytest
from fake_runs import STEPS_PER_EPOCH, write_comparison, write_run
from PIL import Image

from experiments.compare import main, read_runs
from experiments.comparison.document import Bullets, Code, Paragraph, Table, to_html, to_markdown
from experiments.comparison.plan import Outcome
from experiments.comparison.report import Comparison, content
from experiments.comparison.run_record import ScalePoint, read_run
from experiments.comparison.statistics import judge, summarize
from experiments.comparison.tables import runs_table, summary_table
from experiments.comparison.wording import DEFINITION, verdict_text
from experiments.errors import UserError

PICTURES = {
    "overview.png": (1800, 1275),
    "accuracy.png": (1800, 750),
    "loss.png": (1800, 750),
    "loss_scale.png": (1500, 1230),
    "cost.png": (1950, 750),
}


def write_accuracies(out, **by_precision):
    """Writes runs of one epoch with these test accuracies, a run for each."""
    for precision, accuracies in by_precision.items():
        for seed, accuracy in enumerate(accuracies):
            path = out / "runs" / f"{precision}-seed{seed}"
            write_run(path, precision, seed, epochs=1, accuracies=[accuracy])
    return read_runs(out)


def compared(runs, missing=(), outcomes=None):
    return Comparison(("python", "-m", "experiments.compare"), runs, missing, outcomes or {})


def words(comparison):
    return "\n".join(
        "\n".join(block.items) if isinstance(block, Bullets) else block.text
        for block in content(comparison, [])
        if isinstance(block, Bullets | Paragraph | Code)
    )


# Reading


def test_a_run_is_read_back(tmp_path):
    events = [
        {"event": "loss_scale", "step": 0, "loss_scale": 8.0},
        {
            "event": "skip",
            "step": 3,
            "loss_scale": 8.0,
            "loss": None,
            "leaves": [],
            "num_leaves": 0,
        },
        {"event": "loss_scale", "step": 3, "loss_scale": 4.0},
        {"event": "checkpoint", "step": 22},
    ]
    run = read_run(write_run(tmp_path / "run", "float16", 1, done=2, events=events))
    assert (run.precision, run.seed, run.epochs_done, run.is_complete) == ("float16", 1, 2, False)
    assert run.scales == (ScalePoint(0, 8.0), ScalePoint(3, 4.0))
    assert run.skips == (ScalePoint(3, 8.0),)
    assert run.last_step == 2 * STEPS_PER_EPOCH
    assert [epoch for epoch, _ in run.series("test_loss")] == [1, 2]


def test_no_run_and_a_run_without_an_epoch(tmp_path):
    assert read_run(tmp_path) is None
    run = read_run(write_run(tmp_path / "run", done=0))
    assert (run.epochs_done, run.is_complete, run.last("test_loss")) == (0, False, None)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([100.0, 90.0, 10.0], 90.0), ([None, 80.0, 100.0], 90.0), ([None], None)],
)
def test_speed_is_the_median_of_the_epochs_that_have_one(tmp_path, values, expected):
    run = read_run(write_run(tmp_path / "run", epochs=1))
    metrics = tuple({"epoch": 1, "images_per_second": value} for value in values)
    assert dataclasses.replace(run, metrics=metrics).images_per_second == expected


def test_the_reason_of_a_stop_counts_until_the_run_is_resumed(tmp_path):
    stop = {"event": "stop", "step": 5, "reason": "stalled"}
    resume = {"event": "resume", "step": 5}
    assert read_run(write_run(tmp_path / "a", done=0, events=[stop])).stop_reason == "stalled"
    assert read_run(write_run(tmp_path / "b", done=0, events=[stop, resume])).stop_reason == ""


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"precision": "int8", "seed": 0, "epochs": 1}'])
def test_a_config_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        read_run(tmp_path)


# Statistics


def test_mean_spread_and_sample_deviation():
    summary = summarize([1.0, None, 2.0, 6.0])
    assert (summary.count, summary.mean, summary.low, summary.high) == (3, 3.0, 1.0, 6.0)
    assert summary.sd == pytest.approx(7**0.5)  # ((1-3)^2 + (2-3)^2 + (6-3)^2) / (3 - 1)


def test_a_single_value_has_no_deviation_and_none_has_no_summary():
    assert summarize([2.0]).sd is None
    assert summarize([None]) is None


@pytest.mark.parametrize(
    ("float16", "standing"),
    [
        ([0.96, 0.98], "within"),
        ([0.96, 0.96], "within"),  # the lowest itself
        ([0.98, 0.98], "within"),  # the highest itself
        ([0.97, 0.9902], "above"),
        ([0.95, 0.9699], "below"),  # its best is within, its mean is not
    ],
)
def test_the_mean_decides_against_lowest_and_highest_of_float32(tmp_path, float16, standing):
    runs = write_accuracies(tmp_path, float32=[0.96, 0.98], float16=float16)
    assert judge(runs, "float16").standing == standing


def test_equal_accuracies_are_within_in_spite_of_rounding(tmp_path):
    same = [5 / 360] * 3  # their sum in floats, over 3, is something else
    runs = write_accuracies(tmp_path, float32=same, float16=same)
    assert judge(runs, "float16").standing == "within"


def test_runs_that_are_not_complete_do_not_count(tmp_path):
    for seed, done in ((0, 2), (1, 2), (2, 1)):
        accuracies = [0.5, 0.9 + seed / 100] if done == 2 else [0.1]
        path = tmp_path / "runs" / f"float32-seed{seed}"
        write_run(path, seed=seed, epochs=2, done=done, accuracies=accuracies)
    baseline = judge(read_runs(tmp_path), "float16").baseline
    assert (baseline.count, baseline.low, baseline.high) == (2, 90.0, 91.0)


# Words


@pytest.mark.parametrize(
    ("float16", "expected"),
    [
        (
            [0.97, 0.972],
            "float16 is within float32's spread: mean test accuracy 97.10 % (2 seeds), float32's "
            "2 seeds reach from 96.00 to 98.00 % with mean 97.00 %; the means differ by +0.10 "
            "points.",
        ),
        (
            [0.99],
            "float16 is above float32's spread, so not worse: test accuracy 99.00 % (1 seed), "
            "float32's 2 seeds reach from 96.00 to 98.00 % with mean 97.00 %; the means differ by "
            "+2.00 points.",
        ),
        (
            [0.95, 0.94],
            "float16 is below float32's spread, so worse: mean test accuracy 94.50 % (2 seeds), "
            "float32's 2 seeds reach from 96.00 to 98.00 % with mean 97.00 %; the means differ by "
            "-2.50 points.",
        ),
    ],
)
def test_verdict_in_words(tmp_path, float16, expected):
    runs = write_accuracies(tmp_path, float32=[0.96, 0.98], float16=float16)
    assert verdict_text(judge(runs, "float16")) == expected


def test_with_one_float32_run_no_spread_is_known(tmp_path):
    text = verdict_text(
        judge(write_accuracies(tmp_path, float32=[0.96], float16=[0.95]), "float16")
    )
    assert "95.00 % (1 seed) against 96.00 % of float32 (1 seed)" in text
    assert "-1.00 points" in text
    assert "no spread is known" in text
    assert "within" not in text and "worse" not in text


def test_without_runs_nothing_is_judged(tmp_path):
    runs = write_accuracies(tmp_path, float16=[0.95])
    assert "float32 has no complete run" in verdict_text(judge(runs, "float16"))
    assert verdict_text(judge(runs, "bfloat16")) == (
        "bfloat16: no complete run, so nothing can be said."
    )


def test_report_says_verdicts_costs_and_the_definition(tmp_path):
    for precision, speed, memory in (("float32", 200.0, 1e9), ("float16", 300.0, 0.6e9)):
        metrics = {"images_per_second": speed, "peak_memory_bytes": memory}
        write_run(tmp_path / "runs" / precision, precision, epochs=1, metrics=metrics)
    text = words(compared(read_runs(tmp_path)))
    assert (
        "float16 against float32: 1.50 times its training speed (300 against 200 images/s), 0.60 "
        "times its peak resident set (600 against 1,000 MB)." in text
    )
    assert DEFINITION in text


# Tables


def test_summary_table_to_the_digit(tmp_path):
    for seed, (accuracy, speed) in enumerate([(0.961, 100.04), (0.978, 200.0), (0.964, 150.0)]):
        metrics = {
            "test_loss": 0.1 * (seed + 1),
            "images_per_second": speed,
            "total_skips": 3 + seed,
            "peak_memory_bytes": 1_234_567_890,
        }
        path = tmp_path / "runs" / f"float16-seed{seed}"
        write_run(path, "float16", seed, epochs=1, accuracies=[accuracy], metrics=metrics)
    table = summary_table(read_runs(tmp_path), "resident set")
    cells = {row[0]: row[1] for row in table.rows}
    assert table.header == ["quantity", "float16, 3 complete"]
    assert cells["test accuracy, %"] == "96.77 ± 0.91 (96.10 to 97.80)"
    assert cells["test loss, nats"] == "0.2000 ± 0.1000 (0.1000 to 0.3000)"
    assert cells["training speed, images/s"] == "150.0 ± 50.0 (100.0 to 200.0)"
    assert cells["peak memory (resident set), MB"] == "1,234.6 ± 0.0 (1,234.6 to 1,234.6)"
    assert cells["memory of the step (XLA), MB"] == "290.0 ± 0.0 (290.0 to 290.0)"
    assert cells["compilation, s"] == "30.5 ± 0.0 (30.5 to 30.5)"
    assert cells["skipped steps"] == "4.0 ± 1.0 (3 to 5)"


def test_unknown_numbers_are_dashes(tmp_path):
    metrics = {"images_per_second": None}
    facts = {"step_memory_bytes": None}
    write_run(tmp_path / "runs" / "a", epochs=1, accuracies=[0.5], metrics=metrics, facts=facts)
    table = summary_table(read_runs(tmp_path), "resident set")
    cells = {row[0]: row[1] for row in table.rows}
    assert cells["training speed, images/s"] == "–"
    assert cells["memory of the step (XLA), MB"] == "–"
    assert cells["test accuracy, %"] == "50.00"  # one run has no spread


def test_every_run_has_a_row_with_the_epochs_that_it_has_done(tmp_path):
    write_comparison(tmp_path, seeds=1)
    write_run(tmp_path / "runs" / "float16-seed1", "float16", 1, done=7)
    rows = runs_table(read_runs(tmp_path), "resident set").rows
    assert [row[:2] for row in rows] == [
        ["float32, seed 0", "20 of 20"],
        ["bfloat16, seed 0", "20 of 20"],
        ["float16, seed 0", "20 of 20"],
        ["float16, seed 1", "7 of 20"],
    ]
    assert re.fullmatch(r"\d+", rows[2][-1])


# What else a report says


def test_failed_and_missing_runs_are_reported_with_their_message(tmp_path):
    write_run(tmp_path / "runs" / "float32-seed0", epochs=1)
    stop = {"event": "stop", "step": 5, "reason": "the loss of step 5 is nan"}
    write_run(tmp_path / "runs" / "float16-seed0", "float16", epochs=1, done=0, events=[stop])
    outcomes = {"bfloat16-seed0": Outcome((), "cpu", 1, "no space left")}
    text = words(compared(read_runs(tmp_path), ["bfloat16-seed0"], outcomes))
    assert "Not complete, and not counted: float16-seed0, bfloat16-seed0." in text
    assert "bfloat16-seed0 stopped, exit code 1:\nno space left" in text
    assert "float16-seed0 stopped:\nthe loss of step 5 is nan" in text


def test_hardware_versions_options_and_commands(tmp_path):
    write_run(tmp_path / "runs" / "float32-seed0", epochs=1)
    args = ("digits", "--precision", "float32", "--out", "my runs/a")
    outcomes = {"float32-seed0": Outcome(args, "EPYC, 2 cores", 0)}
    text = words(compared(read_runs(tmp_path), (), outcomes))
    assert "Hardware: device cpu; EPYC, 2 cores." in text
    assert "Python 3.11.4, jax 0.10.2, flax 0.12.8, optax 0.2.6" in text
    assert "epochs 1, batch_size 64" in text
    assert "python -m experiments.train digits --precision float32 --out 'my runs/a'" in text
    assert "Seeds: 0." in text


NOT_THE_SAME = "Not all runs were made on the same machine"


def test_runs_on_two_devices_are_pointed_out(tmp_path):
    write_run(tmp_path / "runs" / "a", epochs=1)
    write_run(tmp_path / "runs" / "b", "float16", epochs=1, facts={"device": "NVIDIA H200"})
    assert NOT_THE_SAME in words(compared(read_runs(tmp_path)))


@pytest.mark.parametrize(("machines", "expected"), [("AB", True), ("AA", False), ("A", False)])
def test_runs_of_two_machines_are_pointed_out(tmp_path, machines, expected):
    write_comparison(tmp_path, seeds=1, precisions=("float32", "float16"), epochs=1)
    names = ("float32-seed0", "float16-seed0")
    outcomes = {
        name: Outcome((), machine, 0) for name, machine in zip(names, machines, strict=False)
    }
    assert (NOT_THE_SAME in words(compared(read_runs(tmp_path), (), outcomes))) == expected


def test_pictures_that_cannot_be_written(tmp_path, capsys):
    write_run(tmp_path / "runs" / "a", epochs=1)
    (tmp_path / "loss.png").mkdir()
    assert main(["--report-only", "--out", str(tmp_path)]) == 1
    assert "loss.png cannot be written: Is a directory" in capsys.readouterr().err


# Files


@pytest.fixture(scope="module")
def report_dir(tmp_path_factory):
    out = write_comparison(tmp_path_factory.mktemp("comparison"))
    assert main(["--report-only", "--out", str(out)]) == 0
    return out


class Page(html.parser.HTMLParser):
    """Collects the elements of a page, and fails where they do not nest."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_needs_nothing_else(report_dir):
    text = (report_dir / "report.html").read_text()
    page = Page(text)
    images = [attrs for tag, attrs in page.elements if tag == "img"]
    assert len(images) == len(PICTURES)
    assert all(image["src"].startswith("data:image/png;base64,") for image in images)
    assert all(image["alt"] for image in images)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.elements}
    assert not [attrs for tag, attrs in page.elements if "href" in attrs]
    without_images = re.sub(r'src="data:[^"]*"', "", text)
    assert not re.search(r"https?:|url\(|@import", without_images)


def test_html_is_structured(report_dir):
    tags = [tag for tag, _ in Page((report_dir / "report.html").read_text()).elements]
    assert tags.count("h1") == tags.count("main") == tags.count("title") == 1
    assert tags.count("table") == tags.count("caption") == 2
    assert tags.count("figure") == tags.count("figcaption") == len(PICTURES)


def test_markdown_and_html_say_the_same(report_dir):
    marks = re.compile(r"<[^>]*>|!\[[^]]*\]\([^)]*\)|^\|[-:|]+\|$|[#*|`\\]|^- ", re.MULTILINE)

    def plain(text):
        return re.sub(r"\s+", "", marks.sub("", text))

    page = (report_dir / "report.html").read_text()
    body = re.sub(r'<img alt="[^>]*>', "", page[page.index("<main>") : page.index("</main>")])
    assert plain((report_dir / "report.md").read_text()) == plain(html.unescape(body))


def test_markdown_links_to_the_pictures(report_dir):
    links = re.findall(r"!\[[^]]+\]\(([^)]+)\)", (report_dir / "report.md").read_text())
    assert links == list(PICTURES)


def test_pictures_have_their_size_and_something_in_every_part(report_dir):
    for name, size in PICTURES.items():
        with Image.open(report_dir / name) as image:
            assert image.size == size, name
            grey = np.asarray(image.convert("L"))
        assert grey[0, 0] == 255
        for half in np.array_split(grey, 2, axis=1):
            assert (half < 128).mean() > 0.002, name


@pytest.mark.parametrize("done", [0, 1, 5])
def test_report_of_runs_under_way(tmp_path, capsys, done):
    write_run(tmp_path / "runs" / "float16-seed0", "float16", done=done)
    assert main(["--report-only", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert f"| float16, seed 0 | {done} of 20 |" in text
    assert "float16: no complete run" in text
    assert (tmp_path / "report.html").stat().st_size > 100_000


def test_report_of_one_epoch_without_a_loss_scale(tmp_path):
    write_comparison(tmp_path, seeds=2, precisions=("float32", "bfloat16"), epochs=1)
    assert main(["--report-only", "--out", str(tmp_path)]) == 0


# Rendering


def test_text_cannot_change_the_document():
    text = "a <b> & `c` | *d* [e](f)"
    blocks = [Paragraph(text), Table("t", ["x", text], [["r", text]]), Code("```\n<i>")]
    page = to_html(text, blocks, None)
    assert "<b>" not in page and "<i>" not in page
    assert page.count("a &lt;b&gt; &amp; `c` | *d* [e](f)") == 5
    markdown = to_markdown(text, blocks)
    assert r"a \<b> & \`c\` \| \*d\* \[e\](f)" in markdown
    assert "````\n```\n<i>\n````" in markdown
