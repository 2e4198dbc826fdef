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
