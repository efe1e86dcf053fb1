"""Names of collectives and of work, spelled as the engines spell them (facts/measuring.md section 5)."""

from __future__ import annotations

import pytest

from labkit.trace import names

COLLECTIVES = {
    "AllReduce": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_f16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals)",
        "void sglang::cross_device_reduce_2stage<half, 8>(...)",
        "void aiter::cross_device_reduce_1stage<bf16, 8, true>(...)",
        "void vllm::cross_device_reduce_half_butterfly<half, 8>(...)",
        "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<...>>(...)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, ...>",
        "void twoShotAllReduceKernel<half>",
        "void twoshotAllreduceKernel<4>(...)",
        "multimem_all_reduce_kernel",
        "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(...)",
        "one_shot_all_reduce_kernel",
        "two_shot_all_reduce_kernel_inplace",
        "allreduceAllPairs",
        "void allreduceNvlsWithCopy<half>",
        "void allreduceRsAgZeroCopy<...>",
        "allreduce_1shotLL_1node",
        "pcie_ipc::push_oneshot_kernel",
        "void pcie_ipc::ipc_rsag_kernel<bf16>",
        "void pcie_ipc::ipc_tp2_remote_push<4>",
        "gloo:all_reduce",
        "c10d::allreduce_",
        "_C::shm_allreduce",
        "vllm::all_reduce",
        "_c10d_functional::all_reduce",
    ],
    "AllGather": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "allgatherFullmesh2",
        "gloo:all_gather",
        "_C::shm_all_gather",
        "c10d::_allgather_base_",
        "vllm::all_gather",
    ],
    "ReduceScatter": [
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)",
        "ncclSymkDevKernel_ReduceScatter_LD_sum",
        "gloo:reduce_scatter",
        "c10d::_reduce_scatter_base_",
    ],
    "Broadcast": ["ncclDevKernel_Broadcast_RING_LL(x)", "gloo:broadcast", "c10d::broadcast_"],
    "SendRecv": [
        "ncclDevKernel_SendRecv(x)",
        "_C::shm_send_tensor_list",
        "_C::shm_recv_tensor_list",
        "c10d::send",
    ],
    "Gather": ["_C::shm_gather", "gloo:gather"],
    "Reduce": ["ncclDevKernel_Reduce_Sum_f32_RING_LL(x)"],
    "AllToAll": ["moeAllToAllKernel", "void deep_ep::internode_ll::dispatch<true>(...)", "c10d::alltoall_base_"],
    "Barrier": ["c10d::barrier"],
    "unknown collective": [
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
        "rcclGenericKernel<1, false>",
    ],
}
FUSED = [
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<...>",
    "allreduce_fusion_kernel_twoshot_sync",
    "moereduce_allreduce_fusion_kernel_oneshot_lamport",
    "moefinalize_allreduce_fusion_kernel_oneshot_lamport",
    "oneshotAllreduceFusionKernel",
    "triton_one_shot_push_all_reduce_norm_kernel",
]
NOT = [
    "reduce_segments",
    "paged_attention_ll4mi_reduce_kernel",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
    "void cublasLt::splitKreduce_kernel<32, 16>",
    "rms_norm_kernel",
    "lamport_initialize_kernel",
    "aten::gather",
    "aten::scatter_",
    "void at::native::vectorized_gather_kernel<16, long>",
    "hipMemcpyAsync",
    "vllm::unified_attention_with_output",
    "Memcpy HtoD (Pinned -> Device)",
]
WORK = {
    names.GEMM: [
        "nvjet_tst_128x64_64x9_4x1_v_bz_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32",
        "Cijk_Alik_Bljk_BBS_BH_MT128",
        "void cublasLt::splitKreduce_kernel<32, 16>",
        "_C::onednn_mm",
        "aten::addmm",
        "_C::weight_packed_linear",  # the CPU build's, where the cores have AMX
        "aten::_weight_int4pack_mm_for_cpu",
        "triton_tem_fused_mm_0",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>",
        "void machete::MacheteKernel",
        "void marlin::Marlin<...>",
    ],
    names.ATTENTION: [
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>",
        "reduce_segments",
        "kernel_unified_attention_2d",
        "void vllm::reshape_and_cache_flash_kernel<bf16>",
        "fmhaSm100fKernel_QkvBfloat16",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>",
        "paged_attention_ll4mi_reduce_kernel",
        "vllm::unified_attention_with_output",
        "_C::cpu_attention_with_kv_cache",
        "void vllm::merge_attn_states_kernel",
    ],
    names.MOE: [
        "fused_moe_kernel",
        "void vllm::moe::topkGating<8, 384>",
        "void moe_align_block_size_kernel",
        "grouped_topk_fused_kernel",
    ],
    names.SAMPLING: [
        "_C::greedy_argmax",
        "aten::argmax",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel",
        "_topk_topp_kernel",
    ],
    names.NORM: [
        "void vllm::rms_norm_kernel<c10::BFloat16>",
        "triton_red_fused_add_rms_norm_0",
        "lamport_initialize_kernel",
        "void vllm::act_and_mul_kernel<bf16>",
        "void vllm::rotary_embedding_kernel<bf16, true>",
        "aten::mul",
        "void at::native::vectorized_elementwise_kernel<4>",
        "void at::native::reduce_kernel<512, 1>",
    ],
    names.COPY: [
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        "aten::copy_",
        "aten::_to_copy",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>",
    ],
    names.OVERHEAD: [
        "aten::view",
        "aten::as_strided",
        "aten::empty_strided",
        "c10d::allreduce_",
        "Torch-Compiled Region: 0/1",
    ],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, found in COLLECTIVES.items() for name in found])
def test_collectives(kind: str, name: str) -> None:
    found = names.collective(name)
    assert found is not None
    assert (found.kind, found.fused) == (kind, False)


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_are_marked(name: str) -> None:
    found = names.collective(name)
    assert found is not None
    assert (found.kind, found.fused) == ("AllReduce", True)


@pytest.mark.parametrize("name", NOT)
def test_what_only_looks_like_a_collective(name: str) -> None:
    assert names.collective(name) is None


@pytest.mark.parametrize(("category", "name"), [(kind, name) for kind, found in WORK.items() for name in found])
def test_work(category: str, name: str) -> None:
    assert names.work(name) == category


def test_layers_order_what_records_one_call() -> None:
    order = ["_C::shm_allreduce", "gloo:all_reduce", "c10d::allreduce_", "vllm::all_reduce"]
    layers = [names.collective(name).layer for name in order]  # type: ignore[union-attr]
    assert layers == sorted(set(layers))


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("allreduce", "AllReduce"),
        ("_allgather_base", "AllGather"),
        ("all_to_allv", "AllToAll"),
        ("wait", None),
        ("", None),
        ("_reduce_scatter_base", "ReduceScatter"),
        ("broadcast", "Broadcast"),
        ("send", "SendRecv"),
    ],
)
def test_the_argument_that_names_a_collective(argument: str, kind: str | None) -> None:
    assert names.from_argument(argument) == kind
