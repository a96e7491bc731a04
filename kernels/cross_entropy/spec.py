"""Cross entropy: inputs, shapes and costs."""

import math

import torch
import torch.nn.functional as F

import reference
from autokernel.spec import ROW_SCALES, KernelSpec, TensorSpec, steep

MANY_ROWS = 16


def arguments(dtype, M, V, ignore_index=-100):
    return {"logits": TensorSpec((M, V), dtype), "targets": TensorSpec((M,), torch.int64), "ignore_index": ignore_index}


def eager(logits, targets, ignore_index=-100):
    return F.cross_entropy(logits, targets, ignore_index=ignore_index)


def takes(a):
    """Rows of logits, and a class of each."""
    logits, targets = a["logits"], a["targets"]
    return len(logits.shape) == 2 and targets.shape == logits.shape[:1] and targets.dtype == torch.int64


def random_classes(spec, args, generator):
    """Any class is as likely as another, but for the first and the last, of one row in sixteen each; one in eight is
    ignored, of a single row none.

    Of many rows all count in some draws, as in text without padding; in others chance has it which do; and in others none
    does from some row on, or up to one, as padding leaves them. With as many in each block, a mean of blocks' means would
    be right.
    """
    (rows,), classes, device = spec.shape, args["logits"].shape[-1], generator.device
    targets = torch.randint(classes, spec.shape, generator=generator, device=device)
    targets[5::16], targets[13::16] = 0, classes - 1
    first = int(torch.randint(min(rows, 8), (), generator=generator, device=device))
    draw, part, side = torch.rand(3, generator=generator, device=device).tolist()
    if rows == 1:
        return targets
    if rows <= MANY_ROWS:
        targets[first::8] = args["ignore_index"]
    elif draw < 1 / 3:
        targets[torch.rand(spec.shape, generator=generator, device=device) < 0.1 + 0.6 * part] = args["ignore_index"]
    elif draw < 2 / 3:
        targets[first::8] = targets[int(rows * (1 + 7 * part) / 8) :] = args["ignore_index"]
        targets = targets if side < 1 / 2 else targets.flip(0)
    return targets


def confident_wrong(inputs):
    """Nearly all of the probability on a class that is not the target."""
    logits, wrong = inputs["logits"].clone(), (inputs["targets"] + 1) % inputs["logits"].shape[-1]
    return inputs | {"logits": logits.scatter_(1, wrong[:, None], 100.0)}


def large_offset(inputs):
    """Logits around 2^14: exp overflows unless the maximum is subtracted first."""
    return inputs | {"logits": inputs["logits"] + 2.0**14}


def low_offset(inputs):
    """Logits around -2^14: all that a maximum which starts from some number takes for nothing."""
    return inputs | {"logits": inputs["logits"] - 2.0**14}


def masked(inputs):
    """-inf for the classes that are not allowed: the first half, but for the target. Steep rows."""
    logits, targets = steep(inputs["logits"]), inputs["targets"].clamp(min=0)[:, None]
    kept = logits.gather(1, targets)
    logits[:, : logits.shape[1] // 2] = -torch.inf
    return inputs | {"logits": logits.scatter_(1, targets, kept)}


def rivals(inputs):
    """Two classes of each row, at all places in turn: what is left out of a sum is one of its two terms."""
    return with_rivals(nearly_all_counting(inputs), classes_a_row(inputs))


def rivals_in_place(inputs):
    """The same two classes in each row: too little in some rows and too much in others would average out."""
    return with_rivals(nearly_all_counting(inputs), 0)


def modest_rivals(inputs):
    """Rivals where no number is large: they are above zero by less than 8, the others below it."""
    inputs = nearly_all_counting(inputs)
    lead = round(2 * math.log(inputs["logits"].shape[1]) + 4) / 4  # of both, all others beside which are a small part
    return with_rivals(inputs | {"logits": inputs["logits"] / 4 - lead}, classes_a_row(inputs), lead)


def nearly_all_counting(inputs):
    """All rows count but one: what is left out of some may be in none of the few that padding leaves."""
    ignored, targets = inputs["ignore_index"], inputs["targets"].clamp(0, inputs["logits"].shape[1] - 1)
    targets = targets.masked_fill(targets == ignored, 0 if ignored else min(1, inputs["logits"].shape[1] - 1))
    if len(targets) > 1:
        targets[int(targets.sum()) % len(targets)] = ignored
    return inputs | {"targets": targets}


def classes_a_row(inputs):
    return inputs["logits"].shape[1] / inputs["logits"].shape[0]


def with_rivals(inputs, step, largest=16.0):
    """Two classes of each row nearly alike and far above the others, one of them the target: `step` classes further on than
    in the row before. They differ by as much in all rows, by a number whose exponential bf16 is far from: what is rounded
    on the way does not average out."""
    logits, targets = inputs["logits"].clone(), inputs["targets"].clone()
    (rows, classes), counted = logits.shape, targets != inputs["ignore_index"]
    row, drawn = torch.arange(rows, device=logits.device), int(targets.clamp(min=0).sum())
    first = ((row * step).long() + drawn) % classes
    logits[row, (first + classes // 2) % classes] = largest
    logits[row, first] = largest - (0.25, 0.5, 0.875, 1.0)[drawn % 4]
    targets[counted] = first[counted]
    return inputs | {"logits": logits, "targets": targets}


def few_rows(inputs):
    """A dozen rows at most have a loss, each of another size, the others none: what is left out of a mean is a good part of
    it, or of what it is divided by. Beside the target one other class counts."""
    return with_losses(inputs, 12, 2, 32)


def as_many_rows_as_show(inputs):
    """So many rows have a loss that leaving out any one of them is more than the dtype's rounding."""
    return with_losses(inputs, min(256, int(0.25 / torch.finfo(inputs["logits"].dtype).eps)), 8, 12)


def with_losses(inputs, most, low, high):
    """At most so many rows have a loss, between `low` and `high`, the others none: one in each of so many like parts."""
    logits, targets = inputs["logits"].clone(), inputs["targets"]
    right = targets.clamp(0, logits.shape[1] - 1)
    counted = (targets != inputs["ignore_index"]).nonzero().flatten()
    generator = torch.Generator(logits.device).manual_seed(int(right.sum()))
    parts = min(len(counted), max(1, min(most, len(targets) // 8)))
    like = {"device": logits.device, "generator": generator}
    places = (torch.arange(parts, device=logits.device) + torch.rand(parts, **like)) / max(parts, 1) * len(counted)
    chosen = counted[places.long().unique()]
    losses = low * (high / low) ** torch.rand(len(chosen), **like)
    classes = logits.shape[1]
    rivals = (right[chosen] + 1 + torch.randint(max(1, classes - 1), (len(chosen),), **like)) % classes  # another class
    logits.scatter_(1, right[:, None], 40.0)
    logits[chosen, rivals] = 40.0
    logits[chosen, right[chosen]] = (40.0 - losses).to(logits)
    return inputs | {"logits": logits}


def confident(inputs):
    """Each row nearly sure of its target: the loss is what all other classes together are beside it, each of them next to
    nothing."""
    logits, targets = inputs["logits"] / 4, inputs["targets"].clamp(0, inputs["logits"].shape[1] - 1)
    lead = math.log(max(1, logits.shape[1] - 1)) + 5
    return inputs | {"logits": logits.scatter(1, targets[:, None], lead)}


def other_ignored(inputs, seed):
    """Of every two seeds one ignores a class of the upper half; the other -1, or what is no class: a number below zero,
    one above the classes, or one of more than 32 bits whose last ones are a class's. It is where the one before was."""
    lower, classes = inputs["logits"].shape[-1] // 2, inputs["logits"].shape[-1]
    others = -1, -2 - seed % 1000, classes + seed % 1000, (1 << 40) + 1, 1 - (1 << 40)
    other = lower + seed // 2 % (classes - lower) if seed % 2 else others[seed // 2 % len(others)]
    targets = inputs["targets"]
    return inputs | {"ignore_index": other, "targets": targets.where(targets != inputs["ignore_index"], other)}


def forbidden(inputs):
    """The target of one row that counts at -inf: the loss is infinite. Rows that do not count are -inf altogether."""
    return with_target(inputs, -torch.inf)


def certain(inputs):
    """The target of one row that counts at infinity: the loss is NaN, not 0."""
    return with_target(inputs, torch.inf)


def with_target(inputs, value):
    """A logit of that value at the target of one row; rows that do not count are -inf."""
    logits, targets, counted = inputs["logits"].clone(), inputs["targets"], inputs["targets"] != inputs["ignore_index"]
    logits[~counted] = -torch.inf
    row = int(counted.nonzero().flatten()[-1:].sum())
    logits[row, targets[row].clamp(0, logits.shape[1] - 1)] = value
    return inputs | {"logits": logits, "targets": targets.clone()}


def padded(inputs):
    """The last classes are -inf in all rows, as where a vocabulary is padded, and rows that do not count altogether."""
    logits, targets, ignored = inputs["logits"].clone(), inputs["targets"].clone(), inputs["ignore_index"]
    counted, kept = targets != ignored, max(1, logits.shape[1] - max(4, logits.shape[1] // 8))
    logits[~counted] = logits[:, kept:] = -torch.inf
    made = targets[counted].clamp(max=kept - 1)
    targets[counted] = torch.where(made == ignored, (made + 1) % kept, made)
    return inputs | {"logits": logits, "targets": targets}


def nothing_left(inputs):
    """One row that counts is -inf altogether, as all rows are that do not: of no class there is any chance, and the loss is
    NaN."""
    inputs = with_target(inputs, -torch.inf)
    row = int((inputs["targets"] != inputs["ignore_index"]).nonzero().flatten()[-1:].sum())
    inputs["logits"][row] = -torch.inf
    return inputs


def far_apart(inputs):
    """Losses beyond the range of fp16, of logits within it: infinity there, not the largest number."""
    logits, targets = inputs["logits"], inputs["targets"].clamp(0, inputs["logits"].shape[1] - 1)[:, None]
    return inputs | {"logits": torch.full_like(logits, 6e4).scatter(1, targets, -6e4), "targets": inputs["targets"].clone()}


def one_early_row_counts(inputs):
    """One row of the first half counts: no other block of rows has anything to add."""
    return few_count(inputs, range(max(1, len(inputs["targets"]) // 2)), most=1)


def few_late_rows_count(inputs):
    """One row or two of the last half count: what is added up starts with blocks of nothing."""
    return few_count(inputs, range(len(inputs["targets"]) // 2, len(inputs["targets"])), most=2)


def few_count(inputs, places, most):
    """Of all rows so many at most count, all of them at `places`: which ones, the classes tell."""
    targets = inputs["targets"].clamp(0, inputs["logits"].shape[1] - 1)
    drawn, rows = int(targets.sum()), torch.arange(len(targets), device=targets.device)
    chosen = [places[drawn // divisor % len(places)] for divisor in range(1, 2 + drawn % most)]
    ignored = inputs["ignore_index"]
    targets = targets.masked_fill(targets == ignored, 0 if ignored else min(1, inputs["logits"].shape[1] - 1))
    return inputs | {"targets": targets.masked_fill(~torch.isin(rows, torch.tensor(chosen, device=rows.device)), ignored)}


def with_classes(of_row):
    """The rows that count have the classes that `of_row` makes of theirs, put in order, and of the number of all."""

    def changed(inputs):
        targets, classes = inputs["targets"].clone(), inputs["logits"].shape[1]
        counted = targets != inputs["ignore_index"]
        made = of_row(targets[counted].sort().values, classes).clamp(0, classes - 1)
        targets[counted] = torch.where(made == inputs["ignore_index"], (made + 1) % classes, made)
        return inputs | {"targets": targets}

    return changed


def the_largest(inputs):
    """The rows that count have the class that their logits tell, as those of a model that is right."""
    largest, targets = inputs["logits"].nan_to_num(0.0, 0.0, 0.0).argmax(-1), inputs["targets"]
    kept = (targets == inputs["ignore_index"]) | (largest == inputs["ignore_index"])
    return inputs | {"targets": targets.where(kept, largest)}


def ignored_where(rule):
    """Rows do not count where `rule` says so of their places and of how many there are; all others do."""

    def changed(inputs):
        ignored, classes = inputs["ignore_index"], inputs["logits"].shape[1]
        targets = inputs["targets"].clamp(0, classes - 1)
        targets = torch.where(targets == ignored, (targets + 1) % classes, targets)
        places = torch.arange(len(targets), device=targets.device)
        return inputs | {"targets": targets.masked_fill(rule(places, len(targets)), ignored)}

    return changed


def all_ignored(inputs):
    """No row counts: the mean of none is NaN, as in F.cross_entropy."""
    return inputs | {"targets": torch.full_like(inputs["targets"], inputs["ignore_index"])}


SPEC = KernelSpec(
    name="cross_entropy",
    oracle=reference.cross_entropy,
    eager=eager,
    eager_form="F.cross_entropy",
    arguments=arguments,
    smoke={"M": 8, "V": 256},
    any_size=("M", "V"),
    sweep=(
        {"M": 1, "V": 32000},  # one token
        {"M": 512, "V": 2},  # a binary classifier
        {"M": 256, "V": 1000},  # ImageNet
        {"M": 64, "V": 4096},
        {"M": 128, "V": 2048, "ignore_index": 0},  # padding as a class
        {"M": 96, "V": 500, "ignore_index": 7},
        {"M": 16, "V": 8192},
        {"M": 9, "V": 32000},  # LLaMA
        {"M": 5, "V": 50257},  # GPT-2: odd rows
        {"M": 3, "V": 128256},  # LLaMA 3
    ),
    edges=(
        {"M": 7, "V": 1023},
        {"M": 5, "V": 4097},
        {"M": 3, "V": 1537},
        {"M": 1, "V": 1},
        {"M": 65, "V": 17},
        {"M": 1025, "V": 33},
    ),
    timing={
        "cpu": ({"M": 512, "V": 32000}, {"M": 512, "V": 4096}, {"M": 4096, "V": 1000}),
        "cuda": ({"M": 4096, "V": 32000}, {"M": 8192, "V": 50257}, {"M": 4096, "V": 128256}),
    },
    flops=lambda a: 4 * a["logits"].numel,  # max, subtract, exp (counted as one), add
    # read logits and targets, write one number
    bytes_moved=lambda a: a["logits"].nbytes + a["targets"].nbytes + a["logits"].dtype.itemsize,
    headline="bandwidth_gb_s",
    finite_below=1e30,
    fill={"targets": random_classes},
    decisive={
        "rivals": rivals,
        "rivals_in_place": rivals_in_place,
        "modest_rivals": modest_rivals,
        "few_rows": few_rows,
        "as_many_rows_as_show": as_many_rows_as_show,
        "confident": confident,
    },
    redrawn={"ignore_index": other_ignored},
    counted=lambda logits, targets, ignore_index=-100: (targets != ignore_index)[:, None],
    takes=takes,
    row_scales=(*ROW_SCALES, 1e8),
    adversarial={
        "confident_wrong": confident_wrong,
        "large_offset": large_offset,
        "low_offset": low_offset,
        "masked": masked,
        "padded": padded,
        "far_apart": far_apart,
        "forbidden": forbidden,
        "certain": certain,
        "nothing_left": nothing_left,
        "one_early_row_counts": one_early_row_counts,
        "few_late_rows_count": few_late_rows_count,
        "all_ignored": all_ignored,
        "a_first_half_ignored": ignored_where(lambda places, rows: places < rows // 2),
        "a_last_half_ignored": ignored_where(lambda places, rows: places >= rows - rows // 2),
        "every_other_ignored": ignored_where(lambda places, rows: places % 2 == 1),
        "classes_in_order": with_classes(lambda ordered, classes: ordered),
        "classes_apart": with_classes(lambda ordered, classes: torch.arange(len(ordered), device=ordered.device)),
        "the_first_class": with_classes(lambda ordered, classes: 0 * ordered),
        "the_last_class": with_classes(lambda ordered, classes: 0 * ordered + classes - 1),
        "the_largest": the_largest,
    },
)
