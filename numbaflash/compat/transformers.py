"""Attention of Hugging Face transformers: ``attn_implementation="numba"`` for every model that looks its attention up by name.

Not "numbaflash": since 5.0, transformers takes every name that has "flash" in it for one of its flash_attn back ends
(`transformers.utils.generic.is_flash_attention_requested`). While a model is made, it then wants to load the package of that name from its hub
and fails; models of pictures would pass the boundaries of packed sequences in place of a mask, and ``generate`` would treat caches and masks in
another way. No registration changes that.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..problem import UnsupportedError, no_dropout
from ..torch import attention

__all__ = ["attention_forward", "register"]


def register(name="numba"):
    """Make these kernels an attention implementation of transformers, for models of the whole process.

    Parameters
    ----------
    name : str, optional
        What models call it: ``from_pretrained(..., attn_implementation=name)``, or ``model.set_attn_implementation(name)``. Without "flash"
        in it.

    Raises
    ------
    TypeError
        When the name is no string.
    ValueError
        When "flash" is in it, or it is one of those that transformers has.

    Notes
    -----
    Models hand over the masks that they make for torch's own attention (bool, True = attend; none where causal attention says it all). Padding,
    packed sequences told by ``position_ids`` and sliding windows come in them.

    Examples
    --------
    >>> import numbaflash.compat.transformers
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> numbaflash.compat.transformers.register()
    >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="numba")
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string; got {name!r}")
    if "flash" in name:
        raise ValueError(f'name must not have "flash" in it, or transformers wants to load a package of that name from its hub; got {name!r}')
    if name == "eager" or AttentionInterface().get(name, attention_forward) is not attention_forward:
        raise ValueError(f"name must be a new one; got {name!r}, which is an attention implementation of transformers or of yours")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    **kwargs,
):
    """What a model calls: the attention function of transformers' ``AttentionInterface``.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its attribute ``is_causal`` counts where the argument is None.
    query : Tensor, (batch, heads, seqlen_q, head_dim)
    key : Tensor, (batch, kv_heads, seqlen_k, head_dim)
    value : Tensor, (batch, kv_heads, seqlen_k, head_dim_v)
    attention_mask : Tensor of bool or of a float dtype, broadcast to (batch, heads, seqlen_q, seqlen_k), or None
        True = attend, or added to the scores. None with ``is_causal``: query i sees key j where ``j <= i``; a query that is alone sees all keys.
    dropout : float, optional
    scaling : float, optional
        ``None`` is ``1 / sqrt(head_dim)``.
    is_causal : bool, optional
    sliding_window : int, optional
        Keys that a query sees, its own included. It is part of a mask, where there is one.
    softcap : float, optional
    s_aux : Tensor, (heads,), optional
        Sinks: a logit a head that joins the softmax.
    position_bias : Tensor, broadcast to (batch, heads, seqlen_q, seqlen_k), optional
        Added to the scores.
    **kwargs
        What else models hand to every implementation; it says nothing of the scores, or is refused.

    Returns
    -------
    out : Tensor, (batch, seqlen_q, heads, head_dim_v)
    None
        In place of the weights, which are nowhere.

    Raises
    ------
    UnsupportedError
        For weights (``output_attentions``), a ``head_mask``, or packed sequences told by ``cu_seq_lens_q`` without a mask. And as
        `numbaflash.torch.attention`.
    """
    _refuse(attention_mask, kwargs)
    options = {"scale": scaling, "softcap": softcap}
    if not no_dropout(dropout):
        options["dropout"] = dropout
    if s_aux is not None:
        options["sinks"] = s_aux.double() if query.dtype.itemsize == 8 else s_aux.float()
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options |= _band(causal, sliding_window, query.shape[2], key.shape[2])
    elif attention_mask.is_floating_point():
        position_bias = attention_mask if position_bias is None else position_bias + attention_mask
    else:
        options["mask"] = attention_mask
    out = attention(*(x.transpose(1, 2) for x in (query, key, value)), bias=position_bias, **options)
    return out, None


def _band(causal, sliding_window, seqlen_q, seqlen_k):
    """causal and window of a layer without a mask: a query that is alone is the last one of a sequence, several are the first ones."""
    if sliding_window is None or (seqlen_q == seqlen_k and seqlen_k <= sliding_window):
        return {"causal": "top_left" if causal and seqlen_q > 1 else False}
    if not causal:
        raise UnsupportedError(f"a sliding window ({sliding_window}) that looks both ways must come as attention_mask, as transformers' masks do")
    return {"causal": "top_left" if seqlen_q > 1 else True, "window": (sliding_window - 1, None)}


def _refuse(attention_mask, kwargs):
    if kwargs.get("output_attentions"):
        raise UnsupportedError('output_attentions asks for the weights, which are nowhere; use attn_implementation="eager" for them')
    if kwargs.get("head_mask") is not None:
        raise UnsupportedError('head_mask scales the weights of heads; use attn_implementation="eager" for it')
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:
        raise UnsupportedError("packed sequences that cu_seq_lens_q tells need a mask, too: pass position_ids that begin again with each sequence")
