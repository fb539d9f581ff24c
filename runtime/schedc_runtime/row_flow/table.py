"""The table of operators: how each lets rows through. What is not in it may let rows meet."""

from __future__ import annotations

import torch

from schedc_runtime.row_flow import basics, indexing, views
from schedc_runtime.row_flow.basics import Rule, along, last, product
from schedc_runtime.row_flow.flows import OperatorCall


def names_in(*texts: str) -> frozenset[str]:
    """The words of some texts."""
    return frozenset(word for text in texts for word in text.split())


_ALIKE: dict[Rule, tuple[str, ...]] = {
    basics.reduces: (
        "sum mean amax amin prod any all var std var_mean std_mean max min median nanmedian nansum logsumexp norm",
        "linalg_vector_norm count_nonzero argmax argmin aminmax mode kthvalue",
    ),
    along(): (
        "_softmax _safe_softmax _log_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp sort",
        "argsort topk glu _fft_r2c _fft_c2c _fft_c2r fft_fft fft_ifft",
    ),
    along("dims"): ("flip roll rot90",),
    basics.attention: (
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math _scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps scaled_dot_product_attention",
    ),
    basics.convolution: ("convolution _convolution conv1d conv2d conv3d mkldnn_convolution cudnn_convolution",),
    basics.normalized: ("native_layer_norm layer_norm _fused_rms_norm rms_norm",),
    basics.group_norm: ("native_group_norm",),
    basics.batch_norm: (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update",
        "_batch_norm_no_update cudnn_batch_norm batch_norm miopen_batch_norm",
    ),
    basics.loss: (
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
        "nll_loss_forward nll_loss2d_forward soft_margin_loss kl_div",
    ),
    basics.embedding_flow: ("embedding",),
    basics.random: (
        "rand randn randint rand_like randn_like randint_like normal normal_functional uniform bernoulli exponential",
        "cauchy log_normal geometric random native_dropout _fused_dropout dropout rrelu_with_noise",
    ),
    basics.batched: (
        "grid_sampler_2d grid_sampler_3d _cdist_forward _linalg_solve_ex linalg_solve_triangular triangular_solve",
        "cholesky_solve linalg_lu_solve latent_heads latent_heads_backward",
    ),
    views.view: ("view _unsafe_view reshape _reshape_alias flatten unflatten",),
    views.permute_flow: ("permute transpose t",),
    views.unsqueeze: ("unsqueeze",), views.squeeze: ("squeeze",),
    views.expand_flow: ("expand",),
    views.repeat_flow: ("repeat",),
    views.take: ("slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind narrow chunk",),
    views.cat: ("cat",), views.stack: ("stack",),
    views.pad: (
        "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d",
        "replication_pad3d",
    ),
    views.diagonal: ("diagonal",), views.windows: ("unfold",),
    views.last_dim(0): ("view_as_real",), views.last_dim(-1): ("view_as_complex",),
    indexing.index: ("index _unsafe_index",),
    indexing.index_put: ("index_put _unsafe_index_put",),
    indexing.gather_flow: ("gather scatter scatter_add scatter_reduce",),
    indexing.index_select: ("index_select index_add index_copy index_fill",),
    last(1): (
        "avg_pool1d max_pool1d max_pool1d_with_indices adaptive_avg_pool1d adaptive_max_pool1d upsample_linear1d",
        "upsample_nearest1d _upsample_nearest_exact1d",
    ),
    last(1, "x"): ("rms_rows",),
    basics.weight_gradient: ("rms_rows_weight",),
    last(2): (
        "avg_pool2d max_pool2d max_pool2d_with_indices adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d",
        "upsample_bilinear2d _upsample_bilinear2d_aa upsample_nearest2d _upsample_nearest_exact2d upsample_bicubic2d",
        "_upsample_bicubic2d_aa im2col col2im triu tril channel_shuffle linalg_inv_ex linalg_cholesky_ex linalg_qr",
        "linalg_svd _linalg_svd linalg_eigh _linalg_eigh _linalg_det linalg_det linalg_matrix_exp diag_embed",
        "linalg_lu_factor_ex _linalg_slogdet linalg_pinv",
    ),
    last(3): (
        "avg_pool3d max_pool3d_with_indices adaptive_avg_pool3d _adaptive_avg_pool3d upsample_trilinear3d",
        "upsample_nearest3d pixel_shuffle pixel_unshuffle",
    ),
    product("mk", "kn", "mn"): ("mm",),
    product("bmk", "bkn", "bmn"): ("bmm",),
    product("mk", "k", "m", ("self", "vec")): ("mv",),
    product("k", "k", "", ("self", "tensor")): ("dot vdot",),
    product("mk", "kn", "mn", ("mat1", "mat2")): ("addmm",),
    product("bmk", "bkn", "bmn", ("batch1", "batch2")): ("baddbmm",),
    product("bmk", "bkn", "mn", ("batch1", "batch2")): ("addbmm",),
    product("mk", "k", "m", ("mat", "vec")): ("addmv",),
    basics.pointwise: (
        "cross linalg_cross masked_fill where clamp clone _to_copy detach alias lift_fresh lift_fresh_copy lift copy",
        "fill zero contiguous positive bucketize isin nan_to_num addcmul addcdiv lerp _conj conj _neg_view real imag",
        "complex polar native_dropout_backward gelu silu mish hardswish elu softplus leaky_relu threshold hardtanh",
        "prelu _prelu_kernel log_sigmoid_forward requires_grad bitwise_and bitwise_or logit",
        "fake_quantize_per_tensor_affine_cachemask celu selu relu6 softshrink hardshrink _weight_norm_interface",
        "rms_rows_backward",
    ),
}  # fmt: skip
RULES = {name: rule for rule, texts in _ALIKE.items() for name in names_in(*texts)}
"""By name of an operator, without ``aten::`` and without the underscore of a write."""

FRESH = names_in(
    "zeros ones empty full arange linspace logspace eye scalar_tensor",
    "tril_indices triu_indices empty_strided new_empty new_zeros new_ones new_full new_empty_strided",
    "zeros_like ones_like full_like empty_like hann_window empty_permuted randperm",
)
"""Operators whose results follow from no value of a tensor."""

SIZED = names_in(
    "view _unsafe_view reshape _reshape_alias flatten unflatten expand repeat slice",
    "narrow split split_with_sizes unsafe_split unsafe_split_with_sizes chunk as_strided",
    "native_group_norm unfold arange zeros ones empty full new_empty new_zeros",
    "new_ones new_full new_empty_strided empty_strided empty_permuted rand randn randint randperm",
    "eye tril_indices linspace select_backward slice_backward col2im repeat_interleave im2col resize",
    "set",
)
"""Operators whose plain arguments are sizes."""


def rule_of(call: OperatorCall, function: torch._ops.OpOverload) -> Rule | None:
    """The rule of an operator; None where none is known."""
    if (rule := RULES.get(call.name)) is not None:
        paired = call.name in ("max", "min", "median") and "other" in call.given
        return basics.pointwise if paired else rule
    return basics.pointwise if torch.Tag.pointwise in function.tags else None
