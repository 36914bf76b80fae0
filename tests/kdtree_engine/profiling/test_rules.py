"""The rule table: names as the libraries write them, and a table that is read strictly."""

from __future__ import annotations

import pathlib
import re

import pytest

from kdtree_engine.errors import ConfigError
from kdtree_engine.profiling.rules import HOST, IDLE, TABLE, UNKNOWN, load_rules

NAMES = {
    "void kdtree::tree_verify_wgmma_kernel<kdtree::Tile<64> >(kdtree::TreeVerifyParams, "
    "CUtensorMap_st)": "verify attention",
    "void kdtree::(anonymous namespace)::merge_kernel<1>(kdtree::TreeVerifyParams)": (
        "verify attention"
    ),
    "kdtree::(anonymous namespace)::merge_kernel(kdtree::BuildParams)": "tree build",
    "kdtree::(anonymous namespace)::chunk_kernel(kdtree::BuildParams)": "tree build",
    "kdtree::(anonymous namespace)::accept_kernel(kdtree::AcceptParams)": "acceptance",
    "kdtree::(anonymous namespace)::compact_kernel(kdtree::CompactParams)": "KV move",
    "kdtree::(anonymous namespace)::indices_kernel(kdtree::IndexParams)": "batch metadata",
    "_verify_mla_prefix_stage1": "verify attention",
    "_fwd_kernel": "other attention",
    "_fwd_grouped_kernel_stage1": "other attention",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::"
    "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>>>>>>(flash::Params)": "other attention",
    "void sm90::decode::dense::flash_fwd_splitkv_mla_kernel<cutlass::bfloat16_t>(Params)": (
        "other attention"
    ),
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<>>(P)": (
        "other attention"
    ),
    "nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT": "dense GEMM",
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64_stage6": "dense GEMM",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(P)": "dense GEMM",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, "
    "int, int>, cutlass::gemm::collective::CollectiveMma<>>>(P)": "dense GEMM",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 7168u, 2112u, 1u, "
    "(deep_gemm::GemmType)0, float>(float*)": "dense GEMM",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 7168u, 2112u, 1u, "
    "(deep_gemm::GemmType)2, float>(float*)": "MoE GEMM",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::"
    "GroupProblemShape<cute::tuple<int, int, int>>>>(P)": "MoE GEMM",
    "fused_moe_kernel": "MoE GEMM",
    "void marlin_moe_wna16::Marlin<__nv_bfloat16, 256>(int4 const*)": "MoE GEMM",
    "void moe_align_block_size_kernel<int>(int const*)": "routing",
    "kimi_k2_moe_fused_gate_kernel(float*)": "routing",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)": "communication",
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)": (
        "norm and elementwise"
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)": (
        "norm and elementwise"
    ),
    "triton_poi_fused_add_mul_0": "norm and elementwise",
    "_per_token_group_quant_mla_deep_gemm_masked_fp8": "norm and elementwise",
    "build_tree_efficient(long*, long*)": "tree build",
    "_reconstruct_tree_mask_kernel": "mask build",
    "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>(float*)": "other attention",
    "void deep_gemm::smxx_paged_mqa_logits_metadata<32u>(int*)": "batch metadata",
    "triton_tem_fused_mm_3": "dense GEMM",
    "triton_tem_fused_flex_attention_0": "other attention",
    "void get_group_gemm_starts<cutlass::bfloat16_t>(int*)": "routing",
    "void vllm::moe_wna16_gemm_kernel<__half, 4>(P)": "MoE GEMM",
    "void at::native::cunn_SoftMaxForward<8, float, float, "
    "at::native::LogSoftMaxForwardEpilogue>(float*)": "sampling",
    "ncclSymDevKernel_AllReduce_RSxLDMC_AGxSTMC_bf16(ncclSymDevArgs const*)": "communication",
    "one_shot_all_reduce_kernel": "communication",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(P)": "communication",
    "void trtllm_mnnvl_allreduce::rmsNormLamport<8, __nv_bfloat16>(P)": "communication",
    "void VerifyTreeGreedy<long, long>(long*)": "acceptance",
    "void set_mla_kv_buffer_kernel<1024l>(char*)": "KV move",
    "void flashinfer::sampling::TopPSamplingFromProbKernel<1024u>(float*)": "sampling",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps"
    "<float>, unsigned int, long, 4>>(P)": "sampling",
    "create_flashinfer_kv_indices_triton": "batch metadata",
    "Memcpy HtoD (Pinned -> Device)": "memory copies",
    "Memset (Device)": "memory copies",
    "kernel": UNKNOWN,
}

# Of TensorRT-LLM, cuDNN and AMD's libraries: the end of long ones is cut off.
VENDORS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x": "other attention",
    "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_3_64x6": "other attention",
    "cudnn_infer_ampere_scudnn_128x64_relu_small_nn_v1": "dense GEMM",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optim": "dense GEMM",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT16x16x512_MI16x16x1_SN": "dense GEMM",
    "Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT64x16x64_MI16x16x": "dense GEMM",
    "__amd_rocclr_copyBuffer": "memory copies",
    "__amd_rocclr_fillBufferAligned": "memory copies",
    "__amd_rocclr_fillBufferUnAligned": "memory copies",
    "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16, 16>(P)": "other attention",
    "_ZN5aiter33paged_attention_ll4mi_QKV_mfma16_kernelI13__hip_bfloat16EEv": "other attention",
    "void paged_attention_ll4mi_reduce_kernel<__hip_bfloat16>(P)": "other attention",
    "aiter::mla_a8w8_qh16_qseqlen1_gqaratio16_ps": "other attention",
    "aiter::mla_dec_stage1_bf16_a16w16_subQ16_mqa16": "other attention",
    "void kn_mla_reduce_v1<MlaReduceKernelV1Traits<512, 128, 1> >(P)": "other attention",
    "kn_mla_reduce_v1_ps<512,32,1>": "other attention",
    "void kn_get_mla_metadata_v1_2<MlaMetadataV12Traits<128, 32, 1> >(P)": "batch metadata",
    "aiter::fmha_fwd_hd128_bf16_causal_rtne_group": "other attention",
    "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<P> >(P)": "other attention",
    "void ck_tile::kentry<256, 1, ck_tile::MoeSortingKernel<P> >(P)": "routing",
    "void ck_tile::kentry<256, 1, ck_tile::MoeSortingMultiPhaseKernel_P0_v2": "routing",
    "void ck::kernel_moe_gemm_2lds<ck::GridwiseMoeGemm<P> >(P)": "MoE GEMM",
    "void ck::kernel_moe_mxgemm_2lds<ck::P>": "MoE GEMM",
    "moe_gemm2_0": "MoE GEMM",
    "aiter::fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256": "MoE GEMM",
    "aiter::fmoe_stage1_bf16_pertokenFp8_blockscale_g1u1_32x256_2tg_pf3": "MoE GEMM",
    "void ck::kernel_gemm_xdl_cshuffle_v3_multi_d_b_preshuffle<P>": "dense GEMM",
    "void ck::kernel_gemm_xdl_cshuffle_v3<ck::P>": "dense GEMM",
    "aiter::bf16gemm_fp32bf16_tn_32x64_splitk_clean": "dense GEMM",
    "hgemm_bf16_32x64x64_S2TN_AS_SPK16_0": "dense GEMM",
    "_batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_qua": "dense GEMM",
    "_gemm_a16_w16_kernel_M32_N32": "dense GEMM",
    "void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2, 16, 8, 4, 1>(int)": "dense GEMM",
    "void wvSplitKQ_hf_<P>": "dense GEMM",
    "void aiter::grouped_topk_kernel<float, 8>(float*)": "routing",
    "void aiter::grouped_topk_opt_sort_kernel<P>": "routing",
    "void aiter::topk_softmax<P>": "routing",
    "void aiter::add_rmsnorm_quant_kernel<__hip_bfloat16>(P)": "norm and elementwise",
    "aiter::fused_qk_rmsnorm_kernel": "norm and elementwise",
    "void aiter::dynamic_per_group_scaled_quant_kernel<P>": "norm and elementwise",
    "void aiter::smooth_per_token_scaled_quant_kernel<P>": "norm and elementwise",
    "void aiter::act_and_mul_kernel<P>": "norm and elementwise",
    "void aiter::kn_entry_2c_sbhd_cached_indirect_inplace<P>": "norm and elementwise",
    "aiter::fuse_qk_rope_concat_and_cache_mla_per_head_kernel": "norm and elementwise",
    "void aiter::concat_and_cache_mla_kernel<P>": "KV move",
    "void aiter::reshape_and_cache_kernel<P>": "KV move",
    "void vllm::cross_device_reduce_2stage<__hip_bfloat16, 8>(P)": "communication",
    "void aiter::cross_device_reduce_1stage<__hip_bfloat16, 8>(P)": "communication",
    "void aiter::allreduce_fusion_kernel_1stage<P>": "communication",
    "void aiter::reduce_scatter_cross_device_store<P>": "communication",
    "void aiter::local_device_load_rmsnorm<P>": "communication",
    "mscclKernel_Sum_hip_bfloat16_Simple_false": "communication",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void quickreduce::allreduce_prototype_twoshot<P>": "communication",
    "kernel_mha": "other attention",
    "void tensorrt_llm::kernels::mmha::masked_multihead_attention_kernel<__": "other attention",
    "fmha_v2_flash_attention_bf16_64_128_S_q_paged_kv_64_sm90_kernel": "other attention",
    "fmhaSm100fKernel_QkvBfloat16OBfloat16H576HV512PagedKvDenseP64": "other attention",
    "void tensorrt_llm::kernels::applyBiasRopeUpdateKVCacheV2<__nv_bfloat": "norm and elementwise",
    "void tensorrt_llm::kernels::applyMLARopeAndAssignQKVKernelGeneration": "norm and elementwise",
    "void tensorrt_llm::kernels::applyMLARopeAndAssignQKVKernelOptContext": "norm and elementwise",
    "void tensorrt_llm::kernels::dsv3MinLatencyKernels::fused_a_gemm_kernel": "dense GEMM",
    "void tensorrt_llm::kernels::userbuffers::userbuffers_fp16_sum_inplace_": "communication",
    "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot": "communication",
    "void tensorrt_llm::kernels::moe::doActivationKernel<P>": "norm and elementwise",
    "void tensorrt_llm::kernels::cutlass_kernels::fusedBuildExpertMapsSortF": "routing",
    "void tensorrt_llm::kernels::quantize_with_block_size<P>": "norm and elementwise",
    "void tensorrt_llm::kernels::acceptDraftTokensByIds<P>": "acceptance",
    "void tensorrt_llm::kernels::updateKVCacheDraftTokenLocationBatchedKern": "KV move",
    "void tensorrt_llm::kernels::topKStage1<P>": "sampling",
    "void tensorrt_llm::kernels::topKStage2Sampling<P>": "sampling",
    "void tensorrt_llm::kernels::airTopPSampling<P>": "sampling",
    "void tensorrt_llm::kernels::moe_comm::moeAllToAllKernel<P>": "communication",
    "void tensorrt_llm::kernels::moe_prepare::computeCountAndIndiceDevice<P": "routing",
}


@pytest.mark.parametrize(("name", "expected"), [*NAMES.items(), *VENDORS.items()])
def test_a_name_has_its_class(name: str, expected: str) -> None:
    assert load_rules().classify(name) == expected


def test_every_class_has_an_example_here() -> None:
    by_other_means = {"draft model", IDLE, HOST}
    assert set(NAMES.values()) | by_other_means == set(load_rules().levers)


def test_every_kernel_of_this_repository_is_known(root: pathlib.Path) -> None:
    folders = (root / "kdtree-engine" / name for name in ("csrc", "csrc_trees"))
    sources = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    declared = re.compile(r"__global__[^;{]*?\b(\w+)\(const __grid_constant__ (\w+) p\b")
    kernels = {found for path in sources for found in declared.findall(path.read_text())}
    assert len(kernels) == 11, "a kernel came or went: give it a rule, and count it here"
    for name, parameters in kernels:
        full = f"void kdtree::(anonymous namespace)::{name}<1>(kdtree::{parameters})"
        assert load_rules().classify(full) != UNKNOWN, full


@pytest.mark.parametrize(
    ("name", "stage", "expected"),
    [
        ("nvjet_tst_64x8_64x16_2x1_v_bz_TNT", "draft", "draft model"),
        ("nvjet_tst_64x8_64x16_2x1_v_bz_TNT", "verify", "dense GEMM"),
        ("_fwd_kernel", "verify", "verify attention"),
        ("_fwd_kernel", "replay", "verify attention"),
        ("_fwd_kernel", "prefill", "other attention"),
        ("_fwd_kernel", "draft", "draft model"),
        ("Memcpy DtoH (Device -> Pageable)", "draft", "memory copies"),
        (
            "kdtree::(anonymous namespace)::select_kernel(kdtree::BuildParams)",
            "draft",
            "tree build",
        ),
    ],
)
def test_the_stage_tells_where_the_name_cannot(name: str, stage: str, expected: str) -> None:
    assert load_rules().classify(name, stage) == expected


@pytest.mark.parametrize(
    ("span", "stage", "starts"),
    [
        ("step[VERIFY bs=4 g_sq=36]", "verify", "decode"),
        ("step[DECODE bs=1]", "decode", "decode"),
        ("step[DRAFT bs=1]", "draft", None),
        ("step[EXTEND bs=1 toks=512]", "prefill", "other"),
        ("step[IDLE bs=0]", "other", "other"),
        ("draft_extend", "draft", None),
    ],
)
def test_sglangs_ranges_are_stages(span: str, stage: str, starts: str | None) -> None:
    found = load_rules().stage(span)
    assert found is not None
    assert (found.name, found.starts) == (stage, starts)


def test_other_ranges_are_none() -> None:
    assert load_rules().stage("scheduler.run_batch") is None
    assert load_rules().tells_host_work("scheduler.run_batch")
    assert not load_rules().tells_host_work("step[VERIFY bs=1]")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('class = "KV move"', 'class = "KV moves"', "rule 4: there is no class 'KV moves'"),
        ('stages = ["draft"]', 'stages = ["drafts"]', "there is no stage ['drafts']"),
        ("match = ['^Memcpy '", "match = ['^Memcpy ('", "is no regular expression"),
        ('source = "csrc_trees/accept.cu"', "", "rule 3 lacks source"),
        ("match = ['']", "match = ['']\nweight = 1", "unknown weight"),
        ('name = "idle gaps"', 'name = "gaps"', "lacks the class 'idle gaps'"),
        ("[[stage]]", "[stage", "is no TOML"),
    ],
)
def test_a_broken_table_is_one_line_with_its_place(
    tmp_path: pathlib.Path, old: str, new: str, complaint: str
) -> None:
    text = TABLE.read_text()
    assert old in text
    path = tmp_path / "rules.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_rules(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)
