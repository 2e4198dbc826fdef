"""Kernels, bytes and FLOPs of small modules, counted by hand."""

import hlo_texts
import pytest

from experiments.gpu.hlo import parse_module
from experiments.gpu.kernels import list_kernels
from experiments.gpu.roofline import measure_costs
from experiments.gpu.targets import GPUS

H200 = GPUS["h200"]
MATRIX = 512 * 512 * 2  # bytes of the loop's float16 matrix


def kernels(text):
    return {kernel.instruction.name: kernel for kernel in list_kernels(parse_module(text))}


def test_loop_counts_as_often_as_it_turns_and_its_condition_not_at_all():
    found = kernels(hlo_texts.LOOP)
    counts = {name: kernel.count for name, kernel in found.items()}
    assert counts == {
        **{"copy.9": 1, "copy.8": 1},
        **{"loop_add_fusion": 7, "gemm_fusion_dot": 7, "loop_reduce_fusion": 7},
    }


def test_loop_of_unknown_length_counts_once_with_its_condition():
    text = hlo_texts.LOOP.replace('"known_trip_count":{"n":"7"},', "")
    assert {k.count for k in kernels(text).values()} == {1}
    assert "loop_compare_fusion" in kernels(text)


def test_product_inside_a_fusion_that_splits_the_sum():
    kernel = kernels(hlo_texts.LOOP)["gemm_fusion_dot"]
    (product,) = kernel.products
    # 512x512x512 multiplications and additions; the four parts are written in float32.
    assert (product.dtype, product.flops) == ("f16", 2 * 512**3)
    assert (kernel.bytes_read, kernel.bytes_written) == (MATRIX, 8 * MATRIX)
    assert kernel.kind == "matrix product"


def test_bytes_of_the_loop():
    turn = (4 + 4) + (MATRIX + 8 * MATRIX) + (8 * MATRIX + MATRIX)
    costs = measure_costs(parse_module(hlo_texts.LOOP), H200)
    assert costs.num_bytes == (4 + 4) + 2 * MATRIX + 7 * turn
    assert costs.kernels == 2 + 3 * 7
    assert costs.flops == {"float16": 7 * 2 * 512**3}
    assert costs.wide_products == []


@pytest.mark.parametrize(
    "branches",
    [
        "true_computation=%region_1.4, false_computation=%region_0.1",
        "branch_computations={%region_0.1, %region_1.4}",
    ],
)
def test_the_branch_that_moves_more_counts(branches):
    text = hlo_texts.CONDITIONAL.replace("BRANCHES", branches)
    costs = measure_costs(parse_module(text), H200)
    assert costs.num_bytes == 64 * 64 * (2 + 4)
    assert (costs.converts_alone, costs.convert_bytes) == (1, 64 * 64 * 6)


def test_update_in_place_counts_the_row_and_gather_the_rows():
    found = kernels(hlo_texts.IN_PLACE)
    row = 4096 * 4
    assert set(found) == {"loop_gather_fusion", "fusion-start"}
    assert found["fusion-start"].bytes_read == row
    assert found["fusion-start"].bytes_written == row
    assert found["loop_gather_fusion"].bytes_read == 64 * 512 * 4 + 64 * 4
    assert found["loop_gather_fusion"].bytes_written == 64 * 512 * 4


def test_convolutions_in_all_three_directions():
    found = kernels(hlo_texts.CONVOLUTIONS)
    flops = 2 * (4 * 16 * 16 * 64) * (3 * 3 * 32)
    image, out, kernel = 4 * 16 * 16 * 32 * 4, 4 * 16 * 16 * 64 * 4, 3 * 3 * 32 * 64 * 4
    forward, by_filter, by_input = (
        found[name] for name in ("cudnn-conv.1", "cudnn-conv-bw-filter.1", "cudnn-conv-bw-input.1")
    )
    assert [k.products[0].flops for k in (forward, by_filter, by_input)] == [flops] * 3
    assert [k.products[0].dtype for k in (forward, by_filter, by_input)] == ["tf32", "tf32", "f32"]
    assert forward.num_bytes == image + kernel + out + 1024  # with the workspace
    assert by_filter.num_bytes == by_input.num_bytes == image + kernel + out
    assert found["wrapped_transpose"].kind == "copy or transpose"


def test_float32_products_are_reported_with_line_and_param():
    costs = measure_costs(parse_module(hlo_texts.CONVOLUTIONS), H200)
    tf32, exact = costs.wide_products
    assert (tf32.kind, tf32.dtype, tf32.count) == ("convolution", "float32 (TF32)", 2)
    assert (exact.dtype, exact.count) == ("float32", 1)
    for wide in (tf32, exact):
        assert wide.source == "/work/resnet.py:95 in ResNet.__call__"
        assert wide.params == ["state.params['stem']['kernel'].value"]


def test_library_calls_and_collectives():
    found = kernels(hlo_texts.LIBRARY_CALLS)
    gemm, reduce = found["cublas-gemm.1"], found["all-reduce-start"]
    assert gemm.products[0][:3] == ("matrix product", "bf16", 2 * 32 * 256 * 128)
    assert gemm.num_bytes == 2 * (32 * 256 + 256 * 128) + 4 * 32 * 128 + 4096
    assert (reduce.kind, reduce.num_bytes) == ("collective", 2 * 4 * 32 * 128)
    assert len(found) == 2


def test_bound_is_the_slower_of_memory_and_compute():
    costs = measure_costs(parse_module(hlo_texts.CONVOLUTIONS), H200)
    by_name = {kernel.name: kernel for kernel in costs.costliest}
    kernel = by_name["cudnn-conv-bw-input.1"]  # at the highest precision, on the float32 units
    assert kernel.seconds == kernel.flops / 67e12 > kernel.num_bytes / 4.8e12
    kernel = by_name["cudnn-conv-bw-filter.1"]
    assert kernel.seconds == kernel.num_bytes / 4.8e12 > kernel.flops / 494.5e12
    seconds = sum(kernel.seconds for kernel in costs.costliest)
    assert costs.bound_seconds == pytest.approx(seconds)
    share = 1 - by_name["cudnn-conv-bw-input.1"].seconds / seconds
    assert costs.memory_bound_share == pytest.approx(share)
