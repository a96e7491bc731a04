"""The nine oracles against formulas written by other hands: torch.nn.functional in fp64, complex numbers, plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F

import reference


@pytest.fixture(autouse=True)
def fp64():
    """Free numbers below are fp64, and the same in every run."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_matmul_is_a_sum_over_k():
    A, B = torch.randn(3, 5), torch.randn(5, 4)
    expected = [[sum(A[m, k] * B[k, n] for k in range(5)) for n in range(4)] for m in range(3)]
    same(reference.matmul(A, B), torch.tensor(expected))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("scale", [1, 1000])
def test_softmax(dim, scale):
    x = torch.randn(4, 5, 6) * scale
    same(reference.softmax(x, dim), F.softmax(x, dim))


def test_softmax_by_hand():
    row = [0.5, -1.0, 2.0]
    total = sum(math.exp(v) for v in row)
    same(reference.softmax(torch.tensor(row)), torch.tensor([math.exp(v) / total for v in row]))


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_layernorm(eps):
    x, weight, bias = torch.randn(2, 3, 16) + 5, torch.randn(16), torch.randn(16)
    same(reference.layernorm(x, weight, bias, eps), F.layer_norm(x, (16,), weight, bias, eps))


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rmsnorm(eps):
    x, weight = torch.randn(2, 3, 16), torch.randn(16)
    same(reference.rmsnorm(x, weight, eps), F.rms_norm(x, (16,), weight, eps))


def test_rmsnorm_by_hand():
    root = math.sqrt((9 + 16) / 2 + 0.5)
    same(reference.rmsnorm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.5), torch.tensor([3 / root, 8 / root]))


def qkv(heads, kv_heads, seq_q, seq_k):
    return torch.randn(2, heads, seq_q, 8), torch.randn(2, kv_heads, seq_k, 8), torch.randn(2, kv_heads, seq_k, 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("seq_q, seq_k", [(7, 7), (3, 9), (9, 3)])
def test_attention(causal, heads, kv_heads, seq_q, seq_k):
    Q, K, V = qkv(heads, kv_heads, seq_q, seq_k)
    expected = F.scaled_dot_product_attention(Q, K, V, is_causal=causal, enable_gqa=True)
    same(reference.flash_attention(Q, K, V, causal), expected)


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("mask_shape", [(7, 9), (2, 1, 7, 9), (1, 4, 1, 9)])
def test_attention_with_a_mask_and_a_scale(boolean, mask_shape):
    Q, K, V = qkv(4, 4, 7, 9)
    mask = torch.randn(mask_shape)
    if boolean:
        mask = mask > -0.5
        mask[..., 0] = True  # every query sees something
    expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask, scale=0.3)
    same(reference.flash_attention(Q, K, V, causal=False, sm_scale=0.3, attn_mask=mask), expected)


def test_attention_takes_a_mask_besides_causality():
    Q, K, V = qkv(2, 2, 6, 6)
    padding = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = False
    both = padding & torch.ones(6, 6, dtype=torch.bool).tril()
    same(reference.flash_attention(Q, K, V, attn_mask=padding), F.scaled_dot_product_attention(Q, K, V, attn_mask=both))


def test_attention_by_hand():
    """Query 1 of 2 sees two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    Q, K = torch.tensor([[0.0], [1.0]])[None, None], torch.tensor([[0.0], [math.log(3)]])[None, None]
    V = torch.tensor([[10.0], [20.0]])[None, None]
    same(reference.flash_attention(Q, K, V, sm_scale=1.0).flatten(), torch.tensor([10.0, 17.5]))


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: x.clamp(min=0) * x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_mlp(activation):
    x, w_gate, w_up, w_down = torch.randn(2, 3, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    hidden = ACTIVATIONS[activation](F.linear(x, w_gate)) * F.linear(x, w_up)
    same(reference.fused_mlp(x, w_gate, w_up, w_down, activation), F.linear(hidden, w_down))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "none"])
@pytest.mark.parametrize("biased", [True, False])
def test_fused_linear(activation, biased):
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(12, 8), torch.randn(12) if biased else None
    expected = F.linear(x, weight, bias)
    expected = expected if activation == "none" else ACTIVATIONS[activation](expected)
    same(reference.fused_linear(x, weight, bias, activation), expected)


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_cross_entropy(ignore_index):
    logits, targets = torch.randn(9, 5) * 10, torch.randint(5, (9,))
    targets[[1, 4]] = ignore_index
    expected = F.cross_entropy(logits, targets, ignore_index=ignore_index)
    same(reference.cross_entropy(logits, targets, ignore_index), expected)


def test_cross_entropy_by_hand():
    """Odds of 1 to 3 for the target of row 0; row 1 is ignored."""
    logits = torch.tensor([[0.0, math.log(3)], [5.0, -5.0]])
    same(reference.cross_entropy(logits, torch.tensor([0, -100])), torch.tensor(math.log(4)))


def angles(seq, half):
    theta = torch.arange(seq)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return theta.cos(), theta.sin()


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_interleaved_is_a_complex_product(rotary_dim):
    x, (cos, sin) = torch.randn(2, 3, 5, 8), angles(5, rotary_dim // 2)
    pairs = torch.view_as_complex(x[..., :rotary_dim].unflatten(-1, (-1, 2)).contiguous())
    rotated = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    same(reference.rotary_embedding(x, cos, sin), torch.cat((rotated, x[..., rotary_dim:]), -1))


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_of_halves_is_hugging_faces(rotary_dim):
    """apply_rotary_pos_emb of transformers' Llama: x * cos + rotate_half(x) * sin, cos and sin repeated."""
    x, (cos, sin) = torch.randn(2, 3, 5, 8), angles(5, rotary_dim // 2)
    part, rest = x.split((rotary_dim, 8 - rotary_dim), -1)
    first, second = part.chunk(2, -1)
    rotated = part * torch.cat((cos, cos), -1) + torch.cat((-second, first), -1) * torch.cat((sin, sin), -1)
    same(reference.rotary_embedding(x, cos, sin, interleaved=False), torch.cat((rotated, rest), -1))


@pytest.mark.parametrize("interleaved, expected", [(True, [0.0, 1.0, 0.0, 2.0]), (False, [0.0, 0.0, 1.0, 2.0])])
def test_rotary_by_hand(interleaved, expected):
    """A quarter turn of the first pair, none of the second."""
    x = torch.tensor([1.0, 0.0, 0.0, 2.0])[None, None, None]
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    same(reference.rotary_embedding(x, cos, sin, interleaved).flatten(), torch.tensor(expected))


@pytest.mark.parametrize("op, python", [("sum", math.fsum), ("max", max)])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_reduce(op, python, dim):
    x = torch.randn(3, 4, 5)
    lines = x.movedim(dim, -1)
    expected = [[python(line) for line in plane] for plane in lines.tolist()]
    same(reference.reduce(x, dim, op), torch.tensor(expected))
