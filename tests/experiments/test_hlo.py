"""Reading a compiled module: shapes, instructions, calls, and where they come from."""

import hlo_texts
import pytest

from experiments.gpu.hlo import Array, parse_arrays, parse_module
from experiments.gpu.origin import Origins


def test_arrays_of_nested_tuples_are_read_with_layouts_and_comments():
    text = "((f16[8,64]{1,0:T(8,128)}, s32[]), /*index=1*/f8e4m3fn[<=16]{0}, token[])"
    assert parse_arrays(text) == (
        Array("f16", (8, 64)),
        Array("s32", ()),
        Array("f8e4m3fn", (16,)),
        Array("token", ()),
    )


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("pred", 3), ("bf16", 6), ("f32", 12), ("c64", 24), ("s4", 2), ("f8e5m2", 3), ("token", 0)],
)
def test_bytes_of_an_array(dtype, num_bytes):
    assert Array(dtype, (3,)).num_bytes == num_bytes


def test_module_has_its_computations_and_the_parameters_their_numbers():
    module = parse_module(hlo_texts.LOOP)
    assert module.entry == "main.3"
    assert set(module.computations) == {
        "fused_computation.gemm_fusion_dot_computation",
        *("dot.reduce_sub_computation", "fused_reduce", "fused_add", "region_0.1"),
        *("fused_compare", "region_1.2", "main.3"),
    }
    entry = module.computations["main.3"]
    assert entry.root == "while.7.0"
    assert [i.index for i in entry.instructions.values()] == [-1, -1, 0, -1, -1, -1, -1]


def test_operands_and_calls_of_an_instruction():
    loop = parse_module(hlo_texts.LOOP)
    turn = loop.computations["main.3"].instructions["while.5"]
    assert turn.operands == ("tuple",)
    assert turn.calls("body") == ["region_0.1"]
    assert turn.calls("condition", "body") == ["region_1.2", "region_0.1"]
    assert turn.arrays == (Array("s32", ()), Array("f16", (512, 512)))


def test_branches_are_read_in_both_spellings():
    old = parse_module(
        hlo_texts.CONDITIONAL.replace(
            "BRANCHES", "true_computation=%region_1.4, false_computation=%region_0.1"
        )
    )
    new = parse_module(
        hlo_texts.CONDITIONAL.replace("BRANCHES", "branch_computations={%region_1.4, %region_0.1}")
    )
    for module in (old, new):
        cond = module.computations["main.5"].instructions["cond.1.clone"]
        names = cond.calls("branch_computations", "true_computation", "false_computation")
        assert names == ["region_1.4", "region_0.1"]


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("module @jit_f { }")


def test_source_is_the_innermost_line_outside_libraries():
    module = parse_module(hlo_texts.CONVOLUTIONS)
    origins = Origins(module)
    call = module.computations["main.1"].instructions["cudnn-conv.1"]
    assert [frame.line for frame in origins.stack(call)] == [389, 95, 21]
    assert origins.source(call) == "/work/resnet.py:95 in ResNet.__call__"


def test_stack_is_the_same_where_parents_are_printed_without_the_shift():
    text = hlo_texts.CONVOLUTIONS
    for key in (1, 2, 3):
        text = text.replace(
            f"file_location_id={key} parent_frame_id={key}",
            f"file_location_id={key} parent_frame_id={key - 1}",
        )
    module = parse_module(text)
    call = module.computations["main.1"].instructions["cudnn-conv.1"]
    assert [frame.line for frame in Origins(module).stack(call)] == [389, 95, 21]


def test_source_is_read_from_the_instruction_in_older_modules():
    module = parse_module(hlo_texts.LOOP)
    dot = module.computations["region_0.1"].instructions["gemm_fusion_dot"]
    assert Origins(module).source(dot) == "/work/loop.py:14"


def test_weights_are_followed_to_the_param():
    module = parse_module(hlo_texts.CONVOLUTIONS)
    entry = module.computations["main.1"]
    origins = Origins(module)
    assert origins.argument(entry, "wrapped_transpose") == "state.params['stem']['kernel'].value"
    assert origins.argument(entry, "get-tuple-element.3") is None
