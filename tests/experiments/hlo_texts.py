"""Modules that XLA compiled for an H200 (jaxlib 0.12.0.1), cut down to what the tests look at."""

CONVOLUTIONS = r"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,16,16,32]{3,2,1,0})->f32[4,16,16,64]{3,2,1,0}}, frontend_attributes={fingerprint="f6c5"}

FileNames
1 "/work/train.py"
2 "/venv/lib/python3.12/site-packages/flax/nnx/nn/linear.py"
3 "/work/resnet.py"

FunctionNames
1 "<module>"
2 "Conv.__call__"
3 "ResNet.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=21 end_line=21 column=0 end_column=0}
2 {file_name_id=3 function_name_id=3 line=95 end_line=95 column=11 end_column=58}
3 {file_name_id=2 function_name_id=2 line=389 end_line=397 column=18 end_column=7}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}


%wrapped_transpose_computation (param_0: f32[3,3,32,64]) -> f32[64,3,3,32] {
  %param_0 = f32[3,3,32,64]{3,2,1,0} parameter(0), metadata={scheduling_name="param_0"}
  ROOT %transpose.2 = f32[64,3,3,32]{3,2,1,0} transpose(%param_0), dimensions={3,0,1,2}, metadata={op_name="w" scheduling_name="transpose.2"}
}

ENTRY %main.1 (x.1: f32[4,16,16,32], w.1: f32[3,3,32,64]) -> f32[4,16,16,64] {
  %w.1 = f32[3,3,32,64]{3,2,1,0} parameter(1), sharding={mesh[], [{}, {}, {}, {}]}, metadata={op_name="state.params[\'stem\'][\'kernel\'].value" scheduling_name="w.1"}
  %x.1 = f32[4,16,16,32]{3,2,1,0} parameter(0), sharding={mesh[], [{}, {}, {}, {}]}, metadata={op_name="x" scheduling_name="x.1"}
  %wrapped_transpose = f32[64,3,3,32]{3,2,1,0} fusion(%w.1), kind=kInput, calls=%wrapped_transpose_computation, metadata={op_name="w" scheduling_name="wrapped_transpose"}, backend_config={"operation_queue_id":"0"}
  %cudnn-conv.1 = (f32[4,16,16,64]{3,2,1,0}, /*index=1*/u8[1024]{0}) custom-call(%x.1, %wrapped_transpose), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward", metadata={op_name="jit(step)/jvp()/conv_general_dilated" scheduling_name="cudnn-conv.1" stack_frame_id=3}, backend_config={"cudnn_conv_backend_config":{"activation_mode":"kNone"}}
  %get-tuple-element.3 = f32[4,16,16,64]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
  %cudnn-conv-bw-filter.1 = (f32[64,3,3,32]{3,2,1,0}, u8[0]{0}) custom-call(%x.1, %get-tuple-element.3), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter", metadata={op_name="jit(step)/transpose(jvp())/conv_general_dilated" stack_frame_id=3}
  %cudnn-conv-bw-input.1 = (f32[4,16,16,32]{3,2,1,0}, u8[0]{0}) custom-call(%get-tuple-element.3, %wrapped_transpose), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, operand_precision={highest,highest}, custom_call_target="__cudnn$convBackwardInput", metadata={op_name="jit(step)/transpose(jvp())/conv_general_dilated" stack_frame_id=3}
  ROOT %get-tuple-element.4 = f32[4,16,16,64]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
}
"""  # noqa: E501

LOOP = r"""HloModule jit_loop, is_scheduled=true

%fused_computation.gemm_fusion_dot_computation (param_0.2: f16[512,512]) -> f32[4,512,512] {
  %param_0.2 = f16[512,512]{1,0} parameter(0), metadata={scheduling_name="param_0.2"}
  %reshape.2 = f16[512,4,128]{2,1,0} reshape(%param_0.2), metadata={scheduling_name="reshape.2"}
  %reshape.3 = f16[4,128,512]{2,1,0} reshape(%param_0.2), metadata={scheduling_name="reshape.3"}
  ROOT %dot.1 = f32[4,512,512]{2,1,0} dot(%reshape.2, %reshape.3), lhs_batch_dims={1}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}, metadata={op_name="jit(loop)/while/body/dot_general" source_file="/work/loop.py" source_line=14}, backend_config={"sizes":["16"]}
}

%dot.reduce_sub_computation (lhs: f32[], rhs: f32[]) -> f32[] {
  %rhs = f32[] parameter(1), metadata={scheduling_name="rhs"}
  %lhs = f32[] parameter(0), metadata={scheduling_name="lhs"}
  ROOT %add.2 = f32[] add(%lhs, %rhs), metadata={scheduling_name="add.2"}
}

%fused_reduce (param_0.7: f32[4,512,512]) -> f16[512,512] {
  %param_0.7 = f32[4,512,512]{2,1,0} parameter(0), metadata={scheduling_name="param_0.7"}
  %constant_6 = f32[] constant(0)
  %reduce.4 = f32[512,512]{1,0} reduce(%param_0.7, %constant_6), dimensions={0}, to_apply=%dot.reduce_sub_computation
  ROOT %convert.4 = f16[512,512]{1,0} convert(%reduce.4)
}

%fused_add (param_0.8: s32[]) -> s32[] {
  %param_0.8 = s32[] parameter(0), metadata={scheduling_name="param_0.8"}
  %constant_2_1 = s32[] constant(1)
  ROOT %add.1.1 = s32[] add(%param_0.8, %constant_2_1)
}

%region_0.1 (arg_tuple.1: (s32[], f16[512,512])) -> (s32[], f16[512,512]) {
  %arg_tuple.1 = (s32[], f16[512,512]{1,0}) parameter(0), metadata={scheduling_name="arg_tuple.1"}
  %get-tuple-element.4 = s32[] get-tuple-element(%arg_tuple.1), index=0
  %loop_add_fusion = s32[] fusion(%get-tuple-element.4), kind=kLoop, calls=%fused_add
  %get-tuple-element.5 = f16[512,512]{1,0} get-tuple-element(%arg_tuple.1), index=1
  %gemm_fusion_dot = f32[4,512,512]{2,1,0} fusion(%get-tuple-element.5), kind=kCustom, calls=%fused_computation.gemm_fusion_dot_computation, metadata={op_name="jit(loop)/while/body/dot_general" source_file="/work/loop.py" source_line=14}, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %loop_reduce_fusion = f16[512,512]{1,0} fusion(%gemm_fusion_dot), kind=kLoop, calls=%fused_reduce, control-predecessors={%gemm_fusion_dot}
  ROOT %tuple.3 = (s32[], f16[512,512]{1,0}) tuple(%loop_add_fusion, %loop_reduce_fusion)
}

%fused_compare (param_0: s32[]) -> pred[] {
  %param_0 = s32[] parameter(0), metadata={scheduling_name="param_0"}
  %constant_4_1 = s32[] constant(7)
  ROOT %lt.1.1 = pred[] compare(%param_0, %constant_4_1), direction=LT
}

%region_1.2 (arg_tuple.3: (s32[], f16[512,512])) -> pred[] {
  %arg_tuple.3 = (s32[], f16[512,512]{1,0}) parameter(0), metadata={scheduling_name="arg_tuple.3"}
  %get-tuple-element.6.0 = s32[] get-tuple-element(%arg_tuple.3), index=0
  ROOT %loop_compare_fusion = pred[] fusion(%get-tuple-element.6.0), kind=kLoop, calls=%fused_compare
}

ENTRY %main.3 (x.1: f16[512,512]) -> f16[512,512] {
  %constant_5_0 = s32[] constant(0)
  %copy.9 = s32[] copy(%constant_5_0)
  %x.1 = f16[512,512]{1,0} parameter(0), sharding={mesh[], [{}, {}]}, metadata={op_name="x"}
  %copy.8 = f16[512,512]{1,0} copy(%x.1)
  %tuple = (s32[], f16[512,512]{1,0}) tuple(%copy.9, %copy.8), metadata={scheduling_name="tuple"}
  %while.5 = (s32[], f16[512,512]{1,0}) while(%tuple), condition=%region_1.2, body=%region_0.1, metadata={op_name="jit(loop)/while" stack_frame_id=5}, backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %while.7.0 = f16[512,512]{1,0} get-tuple-element(%while.5), index=1
}
"""  # noqa: E501

# The first of the branches moves more. BRANCHES is how they are named, which differs by version.
CONDITIONAL = r"""HloModule jit_cond, is_scheduled=true

%fused_convert (param_0: f16[64,64]) -> f32[64,64] {
  %param_0 = f16[64,64]{1,0} parameter(0)
  ROOT %convert.1 = f32[64,64]{1,0} convert(%param_0)
}

%fused_multiply (param_0.1: f16[64,64]) -> f16[64,64] {
  %param_0.1 = f16[64,64]{1,0} parameter(0)
  %constant_1_1 = f16[] constant(2)
  %broadcast.1.1 = f16[64,64]{1,0} broadcast(%constant_1_1), dimensions={}
  ROOT %mul.1.1 = f16[64,64]{1,0} multiply(%param_0.1, %broadcast.1.1)
}

%region_1.4 (x.0: (f16[64,64])) -> (f32[64,64]) {
  %x.0 = (f16[64,64]{1,0}) parameter(0)
  %get-tuple-element.4 = f16[64,64]{1,0} get-tuple-element(%x.0), index=0
  %wrapped_convert = f32[64,64]{1,0} fusion(%get-tuple-element.4), kind=kLoop, calls=%fused_convert
  ROOT %tuple.5 = (f32[64,64]{1,0}) tuple(%wrapped_convert)
}

%region_0.1 (x.1: (f16[64,64])) -> (f32[64,64]) {
  %x.1 = (f16[64,64]{1,0}) parameter(0)
  %get-tuple-element.1.0 = f16[64,64]{1,0} get-tuple-element(%x.1), index=0
  %loop_multiply_fusion = f16[64,64]{1,0} fusion(%get-tuple-element.1.0), kind=kLoop, calls=%fused_multiply
  ROOT %tuple.6 = (f16[64,64]{1,0}) tuple(%loop_multiply_fusion)
}

ENTRY %main.5 (p.1: pred[], x.5: f16[64,64]) -> f16[64,64] {
  %p.1 = pred[] parameter(0)
  %x.5 = f16[64,64]{1,0} parameter(1)
  %tuple.2.0 = (f16[64,64]{1,0}) tuple(%x.5)
  ROOT %cond.1.clone = (f32[64,64]{1,0}) conditional(%p.1, %tuple.2.0, %tuple.2.0), BRANCHES, metadata={op_name="jit(f)/cond"}
}
"""  # noqa: E501

# An asynchronous update in place of one row of 4096, and a gather of 64 rows of 409,600.
IN_PLACE = r"""HloModule jit_update, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }

%fused_dynamic_update_slice.clone (param_0.1: f32[4096,4096], param_1.3: f32[4096]) -> f32[4096,4096] {
  %param_0.1 = f32[4096,4096]{1,0} parameter(0), metadata={scheduling_name="param_0.1"}
  %param_1.3 = f32[4096]{0} parameter(1), metadata={scheduling_name="param_1.3"}
  %bitcast.3 = f32[1,4096]{1,0} bitcast(%param_1.3), metadata={op_name="y"}
  %constant_33_1_1 = s32[] constant(3), metadata={stack_frame_id=4}
  %constant_13_1_1 = s32[] constant(0)
  ROOT %dynamic-update-slice.2.2 = f32[4096,4096]{1,0} dynamic-update-slice(%param_0.1, %bitcast.3, %constant_33_1_1, %constant_13_1_1), metadata={op_name="jit(f)/scatter"}, backend_config={"dynamic_slice_config":{"byte_offset":"0"}}
}

%fused_gather (param_0: f32[409600,512], param_1.4: s32[64]) -> f32[64,1,512] {
  %param_0 = f32[409600,512]{1,0} parameter(0), metadata={scheduling_name="param_0"}
  %param_1.4 = s32[64]{0} parameter(1), metadata={scheduling_name="param_1.4"}
  %bitcast.4 = s32[64,1]{1,0} bitcast(%param_1.4)
  ROOT %gather.3 = f32[64,1,512]{2,1,0} gather(%param_0, %bitcast.4), offset_dims={1,2}, collapsed_slice_dims={}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,512}
}

ENTRY %main.2 (x.1: f32[4096,4096], y.1: f32[4096], table.1: f32[409600,512], i.1: s32[64]) -> f32[4096,4096] {
  %y.1 = f32[4096]{0} parameter(1), sharding={mesh[], [{}]}, metadata={op_name="y"}
  %x.1 = f32[4096,4096]{1,0} parameter(0), sharding={mesh[], [{}, {}]}, metadata={op_name="x"}
  %table.1 = f32[409600,512]{1,0} parameter(2)
  %i.1 = s32[64]{0} parameter(3)
  %loop_gather_fusion = f32[64,1,512]{2,1,0} fusion(%table.1, %i.1), kind=kLoop, calls=%fused_gather
  %fusion-start = ((f32[4096,4096]{1,0}, f32[4096]{0}), f32[4096,4096]{1,0}, u32[]) fusion-start(%x.1, %y.1), kind=kLoop, calls=%fused_dynamic_update_slice.clone, metadata={op_name="jit(f)/scatter"}
  ROOT %fusion-done = f32[4096,4096]{1,0} fusion-done(%fusion-start), metadata={op_name="jit(f)/scatter"}
}
"""  # noqa: E501

# As XLA writes them where it calls cuBLAS, and across devices.
LIBRARY_CALLS = r"""HloModule jit_calls, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[32,256], w: bf16[256,128]) -> f32[32,128] {
  %x = bf16[32,256]{1,0} parameter(0)
  %w = bf16[256,128]{1,0} parameter(1), metadata={op_name="params[\'head\']"}
  %cublas-gemm.1 = (f32[32,128]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}
  %get-tuple-element.1 = f32[32,128]{1,0} get-tuple-element(%cublas-gemm.1), index=0
  %all-reduce-start = f32[32,128]{1,0} all-reduce-start(%get-tuple-element.1), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %all-reduce-done = f32[32,128]{1,0} all-reduce-done(%all-reduce-start)
}
"""  # noqa: E501
