"""Scaled-dot-product attention: inputs, shapes and costs."""

import math
from itertools import product

import torch
import torch.nn.functional as F

import reference
from autokernel.spec import KernelSpec, TensorSpec, steps


def arguments(
    dtype,
    batch,
    heads,
    seq,
    head_dim,
    kv_heads=None,
    seq_k=None,
    causal=True,
    sm_scale=None,
    mask=None,
    transposed=False,
    safe_softmax=True,
):
    """`mask`: "bool" [batch, 1, seq, seq_k] or "float" [seq, seq_k].

    `transposed`: Q, K, V are the [batch, heads, seq, head_dim] views of projections' [batch, seq, heads, head_dim].
    """
    kv_heads, seq_k = kv_heads or heads, seq_k or seq

    def tensor(n, length):
        stride = (length * n * head_dim, head_dim, n * head_dim, 1) if transposed else None
        return TensorSpec((batch, n, length, head_dim), dtype, stride)

    masks = {
        None: None,
        "bool": TensorSpec((batch, 1, seq, seq_k), torch.bool),
        "float": TensorSpec((seq, seq_k), dtype),
    }
    return {
        "Q": tensor(heads, seq),
        "K": tensor(kv_heads, seq_k),
        "V": tensor(kv_heads, seq_k),
        "causal": causal,
        "sm_scale": sm_scale,
        "attn_mask": masks[mask],
        "safe_softmax": safe_softmax,
    }


# batch, heads, kv_heads, seq, seq_k of small calls: groups of two and three, one query, fewer keys than queries.
SMALL = ((2, 4, 2, 13, 21), (3, 9, 3, 1, 7), (2, 6, 3, 9, 3), (5, 4, 1, 2, 10))


def small_calls(dtype):
    """Masks of each form that is broadcast to the scores, along batch, heads, queries and keys: of size 1 there, without
    the first dims that are, or expanded, in larger memory. Of bool and float in turn, with `causal` or without, of SMALL
    sizes. And no mask: of one key, and where K and V are parts of longer caches."""
    for number, one in enumerate(product((False, True), repeat=4)):
        batch, heads, kv_heads, seq, seq_k = SMALL[(number // 4 + number) % 4]
        args = arguments(dtype, batch, heads, seq, 32, kv_heads, seq_k)
        full = (batch, heads, seq, seq_k)
        shape = tuple(1 if is_one else n for is_one, n in zip(one, full))
        lead = next((dim for dim in range(2) if not one[dim]), 2)
        kinds = (torch.bool, dtype) if number % 2 else (dtype, torch.bool)
        wider = TensorSpec((*shape[:3], shape[3] + 5), kinds[0]).strides
        expanded = tuple(0 if is_one else stride for is_one, stride in zip(one, wider))
        masks = [TensorSpec(full, kinds[0], expanded), TensorSpec(shape, kinds[1])]
        if lead:
            masks.append(TensorSpec(shape[lead:], (torch.bool, dtype)[number.bit_count() % 2]))
        for way, mask in enumerate(masks):
            yield args | {"attn_mask": mask, "causal": (number.bit_count() + way) % 2 == 0}
    yield arguments(dtype, batch=3, heads=2, seq=6, seq_k=1, head_dim=32, causal=False)
    for causal, (batch, heads, kv_heads, seq, seq_k) in zip((True, False), SMALL[1:]):
        args = arguments(dtype, batch, heads, seq, 32, kv_heads, seq_k, causal)
        cached = TensorSpec((batch, kv_heads, seq_k, 32), dtype, (kv_heads * 640, 640, 32, 1))
        yield args | {"K": cached, "V": cached}


def takes(a):
    """Four dims each, K and V of one shape, heads in whole groups, and a mask that broadcasts to the scores."""
    Q, K, V, mask = a["Q"].shape, a["K"].shape, a["V"].shape, a["attn_mask"]
    if not len(Q) == len(K) == 4 or K != V or (K[0], K[3]) != (Q[0], Q[3]) or Q[1] % K[1]:
        return False
    scores = (*Q[:3], K[2])
    return mask is None or (len(mask.shape) <= 4 and all(n in (1, m) for n, m in zip(mask.shape[::-1], scores[::-1])))


def causal_mask(queries, keys, device):
    """[queries, keys]: True where a query sees a key, which is no later than it is."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def by_hand(Q, K, V, causal, sm_scale, attn_mask):
    return weights(Q, K, causal, sm_scale, attn_mask) @ V.repeat_interleave(Q.shape[1] // K.shape[1], 1)


def weights(Q, K, causal, sm_scale, attn_mask):
    return torch.softmax(scores(Q, K, causal, sm_scale, attn_mask), -1)


def scores(Q, K, causal, sm_scale, attn_mask):
    K = K.repeat_interleave(Q.shape[1] // K.shape[1], 1)
    scores = (Q * (Q.shape[3] ** -0.5 if sm_scale is None else sm_scale)) @ K.transpose(-2, -1)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        keeps = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if keeps else scores + attn_mask
    return scores


def roundings(eps, Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True, onto=None):
    """Of the weights, which tensor cores take in the inputs' dtype, and of the scores, which are sums in fp32; head by
    head, for here they are in float64. Where few keys count in a row, PyTorch's error in it is luck."""
    batch, heads, seq_q, _ = Q.shape
    shared, fp32 = heads // K.shape[1], torch.finfo(torch.float32).eps
    made = torch.empty_like(Q if onto is None else Q[..., 0])
    scale = Q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seq_q, K.shape[2])
    for b, h in product(range(batch), range(heads)):
        one = (slice(b, b + 1), slice(h, h + 1))
        kv = (slice(b, b + 1), slice(h // shared, h // shared + 1))
        q, k, v = Q[one] * scale, K[kv], V[kv]
        each = weights(Q[one], k, causal, sm_scale, mask if mask is None else mask[one])
        scores = q @ k.mT
        in_scores = q.square() @ k.square().mT + scores.square()  # of their products, and of their sum
        if mask is not None and mask.dtype != torch.bool:  # beside -65504 fp32 keeps little of a score, and loses no more
            both = scores + mask[one]
            in_scores += torch.minimum(both.abs(), (both - mask[one]).abs() / fp32).square().nan_to_num(0, 0, 0)
        moved = each.square() * in_scores * fp32**2  # each weight, by its score's
        mean = each @ v  # from which a weight that is larger moves the result towards its value
        if onto is not None:
            values = onto[one] @ v.mT
            by_scores = moved * (values - (mean * onto[one]).sum(-1, keepdim=True)).square()
            made[one] = ((eps * each * values).square() + by_scores).sum(-1).sqrt()
            continue
        by_scores = moved @ v.square() - 2 * mean * (moved @ v) + mean.square() * moved.sum(-1, keepdim=True)
        made[one] = (eps**2 * (each.square() @ v.square()) + by_scores.clamp(min=0)).sqrt()
    return made.nan_to_num(0, 0, 0)


def eager(Q, K, V, causal=True, sm_scale=None, attn_mask=None, safe_softmax=True):
    if not safe_softmax:
        return by_hand(Q, K, V, causal, sm_scale, attn_mask)
    if causal and attn_mask is not None:  # which F.scaled_dot_product_attention does not take together
        past = causal_mask(Q.shape[2], K.shape[2], Q.device)
        keeps = attn_mask.dtype == torch.bool
        attn_mask, causal = attn_mask & past if keeps else attn_mask.masked_fill(~past, -torch.inf), False
    grouped = bool(Q.shape[1] != K.shape[1])  # of symbolic sizes, too
    return F.scaled_dot_product_attention(Q, K, V, attn_mask, is_causal=causal, scale=sm_scale, enable_gqa=grouped)


def native(attn_mask=None, **inputs):
    """PyTorch's own, as it means it to be: its attention on a GPU (torch 2.11) reads what lies beyond a float mask of one
    number for all keys (a misaligned address, or results off by 0.8; h200-attention-masks-of-one-key.txt), which is written
    out here, and has an average of V for a query that sees no key, where it is 0 on a CPU: no kernel may do as it likes
    there."""
    if attn_mask is None:
        return eager(**inputs)
    if attn_mask.shape[-1:] == (1,):
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], inputs["K"].shape[2]).contiguous()
    y = eager(attn_mask=attn_mask, **inputs)
    if not inputs.get("safe_softmax", True):
        return y
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
    if inputs.get("causal", True):
        seen = seen & causal_mask(y.shape[2], attn_mask.shape[-1], y.device)
    return y.masked_fill(~seen.any(-1, keepdim=True), 0)


def mask(spec, args, generator):
    """A third of the keys hidden: False in a bool mask, -inf in a float one, which else is N(0, 1).

    One query in eight sees no key at all, and one a run of them alone, as padding and sliding windows leave it: of whole
    blocks nothing. Under a float mask another one sees the lowest number wherever it looks, which leaves of its scores
    nothing (of fp16's lowest number: little), and another one numbers beside which scores are small.
    """
    seen = torch.rand(spec.shape, generator=generator) < 2 / 3
    seen[..., 1::8, :] = False
    in_a_run = run_of_keys(seen, generator)
    seen[..., 7::8, :] = in_a_run[..., 7::8, :]
    if spec.shape[-2] < 8 and torch.rand((), generator=generator) < 0.5:  # one row for all queries, say
        seen[..., :1, :] = in_a_run[..., :1, :]
    if spec.dtype == torch.bool:
        return seen
    added = torch.randn(spec.shape, generator=generator).masked_fill(~seen, -torch.inf)
    added[..., 3::8, :] *= 30
    added[..., 5::8, :] = torch.finfo(spec.dtype).min
    return added.to(spec.dtype)


def run_of_keys(seen, generator):
    """For each query keys that lie together, one or more of any length; half of the runs end where the keys do."""
    first, length, ends = torch.rand((3, *seen.shape[:-1], 1), generator=generator)
    keys = seen.shape[-1]
    first = (first * first * keys).long()  # rather an early one, which a causal query sees, too
    last = torch.where(ends < 0.5, keys - 1, first + (length**3 * (keys - first)).long())
    places = torch.arange(keys)
    return (places >= first) & (places <= last)


def causal_with_holes(seen, generator):
    """As a causal mask where one looks at its first and last rows; between them some keys are hidden."""
    made = seen.tril() & (torch.rand(seen.shape, generator=generator, device=generator.device).to(seen.device) < 0.7)
    made[..., 0, 0], made[..., -1, :] = True, True
    return made


def alike_at_both_ends(seen, generator):
    """Rows of the first half are all alike and so are those of the last quarter, as where keys are padding; others not."""
    made, rows = seen.clone(), seen.shape[-2]
    made[..., : rows // 2, :] = made[..., rows - rows // 4 :, :] = padded(seen, generator)[..., :1, :]
    return made


def padded(seen, generator):
    """The last keys hidden from all queries: as many as are half of them at most."""
    keys = seen.shape[-1]
    most = int((0.5 + 0.5 * torch.rand((), generator=generator, device=generator.device).item()) * keys)
    return (torch.arange(keys, device=seen.device) < max(1, most)).expand_as(seen)


def one_pair(seen, generator):
    """Of all pairs one, somewhere, of the first key and a query after some others."""
    made = torch.zeros_like(seen)
    made.view(-1, *seen.shape[-2:])[0, seen.shape[-2] * 3 // 4, 0] = True
    return made


def places(seen):
    """Of queries, as a column, and of keys, as a row."""
    queries, keys = (torch.arange(n, device=seen.device) for n in seen.shape[-2:])
    return queries[:, None], keys


def near(seen, generator):
    """A window of keys up to each query."""
    queries, keys = places(seen)
    return ((keys <= queries) & (keys > queries - max(2, seen.shape[-1] // 6))).expand_as(seen)


def of_texts(seen, generator):
    """Several texts in one row: each sees itself."""
    queries, keys = places(seen)
    length = max(1, -(-seen.shape[-1] // 3))
    return (queries // length == keys // length).expand_as(seen)


def of_two_numbers(mask, number):
    """Finite ones: of a key that is hidden this one, or the lowest that there is."""
    hidden = mask < -1e3
    hidden[..., 0] &= number == -torch.inf  # where each query sees one, its scores are not rounded away in all of a row
    return torch.zeros_like(mask).masked_fill(hidden, max(number, torch.finfo(mask.dtype).min))


# Masks as models have them, and what looks like one: a mask -> where a query sees a key.
SEEN = {
    "all True": lambda seen, g: torch.ones_like(seen),
    "all False": lambda seen, g: torch.zeros_like(seen),
    "all True but for one": lambda seen, g: ~one_pair(seen, g),
    "all False but for one": one_pair,
    "causal": lambda seen, g: seen.new_ones(seen.shape).tril(),
    "causal with holes": causal_with_holes,
    "causal without oneself": lambda seen, g: seen.new_ones(seen.shape).tril(-1),
    "causal after a prefix": lambda seen, g: seen.new_ones(seen.shape).tril() | (places(seen)[1] < seen.shape[-1] // 3),
    "of what is still to come": lambda seen, g: seen.new_ones(seen.shape).triu(),
    "of one key each": lambda seen, g: (places(seen)[1] == places(seen)[0] % seen.shape[-1]).expand_as(seen),
    "of every third key": lambda seen, g: ((places(seen)[0] - places(seen)[1]) % 3 == 0).expand_as(seen),
    "the same for two that see each other": lambda seen, g: (seen | seen.mT) if seen.shape[-1] == seen.shape[-2] else seen,
    "a window": near,
    "of several texts": of_texts,
    "padding at the end": padded,
    "padding at the start": lambda seen, g: padded(seen, g).flip(-1),
    "padding for most queries": alike_at_both_ends,
}
# Those that are added, of finite numbers alone.
ADDED = {
    "of zeros": lambda mask, g: torch.zeros_like(mask),
    "of one number": lambda mask, g: torch.full_like(mask, -1.5),
    "falling evenly": lambda mask, g: ((places(mask)[1] - places(mask)[0]).abs() / -8).to(mask.dtype).expand_as(mask),
    "nowhere -inf": lambda mask, g: mask.masked_fill(mask < -1e3, 1.5),
    "rising evenly": lambda mask, g: (places(mask)[1] / 8).to(mask.dtype).expand_as(mask),
    "of zeros and ones": lambda mask, g: (mask > 0).to(mask.dtype),
    "of zeros and the lowest number": lambda mask, g: of_two_numbers(mask, -torch.inf),
    "of zeros and -1e4": lambda mask, g: of_two_numbers(mask, -1e4),
    "of zeros and -1e9": lambda mask, g: of_two_numbers(mask, -1e9),
}


def with_mask(seen=None, added=None):
    """A function that gives inputs a mask by what it says of the one they have, if they have one of that sort."""

    def made(inputs, generator):
        mask = inputs["attn_mask"]
        if mask is None or mask.dim() < 2 or (added and mask.dtype == torch.bool):
            return {}
        if added:
            return {"attn_mask": added(mask, generator).contiguous()}
        kept = seen(mask if mask.dtype == torch.bool else mask > -torch.inf, generator).contiguous()
        return {"attn_mask": kept if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(~kept, -torch.inf)}

    return made


def nan_in_a_mask(inputs, generator):
    """A key that every query sees, too, is hidden from none: NaN is added to its score, of one query."""
    mask = inputs["attn_mask"]
    if mask is None or mask.dtype == torch.bool or not mask.dim():
        return {}
    mask = mask.clone()
    mask[..., 0] = 0
    mask[(*(-1,) * (mask.dim() - 1), 0)] = torch.nan
    return {"attn_mask": mask}


def huge_scores(inputs):
    """All scores near 120, where exponentials overflow unless the row's maximum is taken off first."""
    Q, K = inputs["Q"].clone(), inputs["K"].clone()
    Q[..., -1] = K[..., -1] = 11 * Q.shape[-1] ** 0.25
    return inputs | {"Q": Q, "K": K}


def low_scores(inputs):
    """All scores near -120, of every other query all alike near -2^14, where rounding would decide: all that a maximum
    which starts from some number takes for nothing. What a float mask adds to those is 0 or -inf: fp32 has steps of 2^-10
    at 2^14."""
    Q, K, added = inputs["Q"].clone(), inputs["K"].clone(), inputs["attn_mask"]
    Q[..., 1::2, :] = 0
    Q[..., -1] = 11 * Q.shape[-1] ** 0.25
    K[..., -1] = -Q[0, 0, 0, -1]
    Q[..., 1::2, -1] *= 128
    if added is not None and added.is_floating_point():
        added = added.clone()
        added[..., 1::2, :].masked_fill_(added[..., 1::2, :].isfinite(), 0)
    return inputs | {"Q": Q, "K": K, "attn_mask": added}


def rising_scores(inputs):
    """Scores that rise along the keys, so that a running maximum changes in every block."""
    K = inputs["K"]
    ramp = torch.linspace(0, 4, K.shape[2], dtype=torch.float32)[:, None].to(K.dtype)
    return inputs | {"Q": inputs["Q"].abs(), "K": K.abs() * ramp}


def equal_scores(inputs):
    """All keys alike: the result is the mean of the values seen; of every fourth query, of those in the last quarter alone,
    whose scores are above the others."""
    Q, K = inputs["Q"].clone(), inputs["K"][:, :, :1].expand_as(inputs["K"]).clone(memory_format=torch.contiguous_format)
    scale, keys = Q.shape[-1] ** -0.5 if inputs["sm_scale"] is None else inputs["sm_scale"], K.shape[2]
    Q[..., -1] = K[..., -1] = 0
    Q[..., 1::4, -1] = (steps(Q[0, 0, 1::4].shape[0]) / 22).to(Q)
    K[..., keys - keys // 4 :, -1] = 22 / scale
    return inputs | {"Q": Q, "K": K}


def large_queries(inputs):
    """Queries and values far from 1, and keys as small as queries are large: scores are what they were."""
    return inputs | {"Q": inputs["Q"] * 2.0**8, "K": inputs["K"] * 2.0**-8, "V": inputs["V"] * 2.0**10}


def large_keys(inputs):
    """The other way round. Without a mask, NaN in what all queries see, the first key, queries of zeros among them: in the
    last head's key, if there are several, and in a channel of the value. So in a channel of the last value, and, of three
    heads or more, in the first one's last key."""
    Q, K, V = inputs["Q"] * 2.0**-8, inputs["K"] * 2.0**8, inputs["V"].clone()
    Q.flatten(0, -2)[2::8] = 0
    if inputs["attn_mask"] is None:
        V[..., 0, 0] = V[..., -1, -1] = torch.nan
        if K.shape[0] * K.shape[1] > 1:
            K[-1, -1, 0, 0] = torch.nan
        if K.shape[0] * K.shape[1] > 2:
            K[0, 0, -1, -1] = torch.nan
    return inputs | {"Q": Q, "K": K, "V": V}


def lost_values(inputs):
    """NaN in a channel of some value, infinities in two of another, NaN in a key and infinities of either sign in one of
    another head, from some queries hidden by a mask; some queries are zeros. Scores are small, and a float mask hides a key
    or does nothing: no weight of what is seen is 0, but beside an infinite key."""
    Q, K, V, mask = inputs["Q"] * 2.0**-6, inputs["K"].clone(), inputs["V"].clone(), inputs["attn_mask"]
    generator = torch.Generator().manual_seed(int(inputs["Q"].double().abs().sum()))
    key, other, third, fourth = (int(torch.randint(V.shape[2], (), generator=generator, device="cpu")) for _ in range(4))
    fourth = (fourth // 2 + 1) % V.shape[2]  # which enough queries see, and none alone
    V[..., key, 0], V[..., other, V.shape[3] // 2], V[..., other, -1] = torch.nan, -torch.inf, torch.inf
    Q.flatten(0, -2)[2::8] = 0
    if V.shape[0] * V.shape[1] > 1:
        K[0, 0, fourth, 0], K[0, 0, fourth, -1] = torch.inf, -torch.inf
        K[-1, -1, third, 0] = torch.nan
    if mask is not None and mask.is_floating_point():
        mask = torch.zeros_like(mask).masked_fill(mask < -1e3, -torch.inf)
    return inputs | {"Q": Q, "K": K, "V": V, "attn_mask": mask}


def loud_values(inputs):
    """A key in eight, and a half of all that lie together, of every other head the other half, has next to no weight, and
    values as large as its weight is small: a weight that is left out because it is small, or a block of them, leaves a good
    part of the result out."""
    Q, K, V = inputs["Q"].clone(), inputs["K"].clone(), inputs["V"]
    (batch, heads, count), half = K.shape[:3], -(-K.shape[2] // 2)
    keys, drawn = torch.arange(count, device=K.device), int(Q.double().abs().sum()) % count
    head = torch.arange(batch * heads, device=K.device).view(batch, heads, 1)
    loud = (keys % 8 == 0) | ((keys - drawn - head % 2 * half) % count < half)
    bits = 10 if V.dtype == torch.float16 else 20
    scale = Q.shape[-1] ** -0.5 if inputs["sm_scale"] is None else inputs["sm_scale"]
    Q[..., -1], K[..., -1] = 4.0, torch.where(loud, -bits * math.log(2) / (4 * scale), 0.0)
    return inputs | {"Q": Q, "K": K, "V": torch.where(loud[..., None], V * 2.0 ** (bits + 3), V)}


def untold(y, Q, K, V, causal=True, attn_mask=None, **options):
    """Results of queries from which a mask hides what is not finite, and of those that see no key: 0 times NaN is NaN where
    a block of keys is looked at, and nothing where it is not."""
    if K.isfinite().all() and V.isfinite().all():
        return torch.zeros((), dtype=torch.bool, device=y.device)
    heads, seq, keys = Q.shape[1], Q.shape[2], K.shape[2]
    K, V = (t.repeat_interleave(heads // t.shape[1], 1) for t in (K, V))
    hidden = torch.zeros(Q.shape[0], heads, seq, keys, dtype=torch.bool, device=y.device)
    if causal:
        hidden |= ~causal_mask(seq, keys, y.device)
    if attn_mask is not None:
        hidden |= ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    lost = (~V.isfinite()).double() + (~K.isfinite()).any(-1, keepdim=True).double()
    nan = V.isnan().double() + K.isnan().any(-1, keepdim=True).double()
    return (hidden.double() @ lost > 0) & ~((~hidden).double() @ nan > 0)


def flops(a):
    """Two products of seq x seq_k x head_dim; with `causal` only the pairs (query, key <= query) count."""
    batch, heads, seq, head_dim = a["Q"].shape
    seq_k = a["K"].shape[2]
    full = min(seq, seq_k)
    pairs = full * (full + 1) // 2 + (seq - full) * seq_k if a["causal"] else seq * seq_k
    return 4 * batch * heads * pairs * head_dim


def bytes_moved(a):
    """Read Q, K, V and the mask, write the result, which has the size of Q."""
    mask = a["attn_mask"]
    return 2 * a["Q"].nbytes + a["K"].nbytes + a["V"].nbytes + (mask.nbytes if mask else 0)


def heads_inside(a):
    """Strides of a [batch, heads, seq, head_dim] that is [batch, seq, heads, head_dim] in memory, as PyTorch's attention
    returns it: a projection goes on with all heads of a position as one row."""
    _, heads, seq, dim = a["Q"].shape
    return seq * heads * dim, dim, heads * dim, 1


SPEC = KernelSpec(
    name="flash_attention",
    oracle=reference.flash_attention,
    result_strides=heads_inside,
    eager=eager,
    native=native,
    roundings=roundings,
    eager_form="F.scaled_dot_product_attention, or softmax(QKᵀ)V by hand",
    arguments=arguments,
    smoke={"batch": 2, "heads": 2, "seq": 32, "head_dim": 64},
    any_size=("seq",),
    sweep=(  # each rest that vectors of eight leave of seq_k is there, here or among the edges
        {"batch": 1, "heads": 6, "seq": 128, "head_dim": 64, "kv_heads": 2, "transposed": True},  # the shipped LLaMA, cut
        {"batch": 2, "heads": 3, "seq": 128, "head_dim": 64, "causal": False},  # BERT
        {"batch": 1, "heads": 2, "seq": 200, "head_dim": 128},  # blocks that do not fill
        {"batch": 2, "heads": 4, "seq": 1, "seq_k": 300, "head_dim": 128, "kv_heads": 1, "causal": False},  # decode
        {"batch": 1, "heads": 2, "seq": 65, "seq_k": 189, "head_dim": 80, "causal": False, "sm_scale": 0.2},  # cross
        {"batch": 1, "heads": 2, "seq": 150, "seq_k": 70, "head_dim": 40},  # more queries than keys
        {"batch": 2, "heads": 2, "seq": 96, "head_dim": 64, "causal": False, "mask": "bool"},
        {"batch": 2, "heads": 2, "seq": 80, "seq_k": 96, "head_dim": 64, "mask": "bool", "safe_softmax": False},
        {"batch": 1, "heads": 2, "seq": 48, "head_dim": 64, "causal": False, "mask": "float", "safe_softmax": False},
        {"batch": 1, "heads": 4, "seq": 100, "head_dim": 64, "kv_heads": 2, "mask": "float"},
        {"batch": 1, "heads": 2, "seq": 60, "seq_k": 90, "head_dim": 96, "mask": "bool", "transposed": True},
        {"batch": 1, "heads": 1, "seq": 513, "head_dim": 64},
    ),
    edges=(
        {"batch": 1, "heads": 1, "seq": 1023, "head_dim": 32},
        {"batch": 1, "heads": 1, "seq": 3, "seq_k": 4097, "head_dim": 64, "causal": False},
        {"batch": 1, "heads": 1, "seq": 17, "seq_k": 1539, "head_dim": 72, "causal": False, "mask": "float"},
        {"batch": 1, "heads": 1, "seq": 1, "head_dim": 1},
        {"batch": 1, "heads": 3, "seq": 19, "seq_k": 39, "head_dim": 33, "kv_heads": 1},
    ),
    timing={
        "cpu": (
            {"batch": 1, "heads": 12, "seq": 512, "head_dim": 64},
            {"batch": 1, "heads": 12, "seq": 512, "head_dim": 64, "kv_heads": 4, "transposed": True},
            {"batch": 1, "heads": 12, "seq": 512, "head_dim": 64, "causal": False},
            {"batch": 1, "heads": 12, "seq": 1, "seq_k": 512, "head_dim": 64, "kv_heads": 4, "causal": False},
        ),
        "cuda": (
            {"batch": 2, "heads": 32, "seq": 2048, "head_dim": 64},
            {"batch": 2, "heads": 32, "seq": 1024, "head_dim": 64},
            {"batch": 1, "heads": 32, "seq": 4096, "head_dim": 64},
            {"batch": 1, "heads": 32, "seq": 2048, "head_dim": 128},
        ),
    },
    flops=flops,
    bytes_moved=bytes_moved,
    headline="throughput_tflops",
    finite_below=1e6,  # the largest score of a row is taken off the others
    fill={"attn_mask": mask},
    filled={f"a mask {what}": with_mask(seen=seen) for what, seen in SEEN.items()}
    | {f"a mask {what}": with_mask(added=added) for what, added in ADDED.items()}
    | {"NaN in a mask": nan_in_a_mask},
    other_values={"sm_scale": (-0.2, 0.0, 0.125, 1.0, 1.5)},  # 0.125: the default for 64 channels
    takes=takes,
    forms=small_calls,
    independent_rows=True,
    untold=untold,
    row_scales=(1e-2, 4.0),  # rounding of the scores is as large as they are
    adversarial={
        "huge_scores": huge_scores,
        "low_scores": low_scores,
        "rising_scores": rising_scores,
        "equal_scores": equal_scores,
        "large_queries": large_queries,
        "large_keys": large_keys,
        "lost_values": lost_values,
        "loud_values": loud_values,
    },
)
