import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_example_trains_in_float16(capsys):
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names = {}
    exec(compile(example, str(README), "exec"), names)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert names["params"]["dense"]["kernel"].dtype == "float16"
    assert names["weights"]["dense"]["kernel"].dtype == "float32"
    assert names["train_step"]._cache_size() == 1


def test_every_test_that_the_readme_names_exists():
    text = README.read_text()
    links = re.findall(r"\[`(\w+)`\]\((tests/\S+?\.py)\)", text)
    assert len(links) > 30
    for name, file in links:
        source = (README.parent / file).read_text()
        assert re.search(rf"^def test_\w*{name}", source, re.MULTILINE), f"{name} in {file}"


def test_every_row_of_the_compatibility_tables_names_a_test():
    section = README.read_text().partition("## What goes inside")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.endswith("| test |")]
    assert len(rows) >= 24
    for row in rows:
        assert re.search(r"\]\(tests/\S+\.py\) \|$", row), row
