"""A worker whose answers are forged: source of a kernel that takes over its worker's end of the channel.

A right kernel otherwise. One answer is forged, `at` answers from the start or from when the judge's side says so with the
request "forge", in a way that `seed` chooses; or, with `op`, every answer to such requests has `fields` replaced.
"""

from autokernel.spec import load_spec

RIGHT = (load_spec("rmsnorm").folder / "cpp_kernel.py").read_text()

FORGER = r'''
import gc, json, os, random, struct
from autokernel.gate.workers.worker import Worker

VALUES = [None, True, False, -1, 0, 1, 3, 64, 2**31, 2**40, 2**47, 2**48, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**70),
          0.5, -0.0, 1e308, -1e-300, float("nan"), float("inf"), "", "much", "\0\x1b[2J\n\u2028", "\ud800", "x" * 100_000,
          [], {}, [[]], [{}], [0] * 17, [1] * 100, [2**40] * 5, [2**47] * 16, [-1, 8], [0] * 100_000, {"": {"": {}}},
          "float64", "bool", "qint8", "bits8", "Tensor", "__class__", "../../etc/passwd"]


def paths(value, path=()):
    """Of all that is in a message."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inside)[:50]:
        yield from paths(part, (*path, key))


def changed(value, path, change):
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


def other(random, value):
    """Near the value, or anything."""
    near = {
        int: lambda: value + random.choice([-value - 1, -1, 1, 4, 64, 4096, value, 1 << 20, 1 << 33, 1 << 46]),
        float: lambda: -value,
        str: lambda: value + random.choice(["\0", "\n", "8", "x"]),
        list: lambda: random.choice([value[:-1], value + value, value[::-1], value + [1], value * 1000]),
        dict: lambda: random.choice([dict(list(value.items())[:-1]), value | {"more": 1}, list(value.items())]),
    }
    return near[type(value)]() if type(value) in near and random.random() < 0.6 else random.choice(VALUES)


def anything(random, depth=0):
    if depth > 4 or random.random() < 0.4:
        return random.choice(VALUES)
    if random.random() < 0.5:
        return [anything(random, depth + 1) for _ in range(random.randrange(4))]
    keys = ["type", "id", "outputs", "inputs", "shape", "stride", "start", "dtype", "addresses", "graph", "error", "build"]
    return {random.choice(keys): anything(random, depth + 1) for _ in range(random.randrange(5))}


def frame(data):
    return struct.pack("!I", len(data)) + data


def text(value):
    return json.dumps(value).encode()


def forged(random, answer):
    """Bytes in the place of an answer, and whether the process then ends."""
    honest, whole = text(answer), random.random()
    if whole < 0.6:
        for _ in range(random.choice([1, 1, 1, 2, 4])):
            path = random.choice([p for p in paths(answer) if p] or [()])
            answer = changed(answer, path, lambda value: other(random, value))
            if not isinstance(answer, dict):
                break
        return frame(text(answer)), False
    if whole < 0.7:
        return frame(text(anything(random))), False
    if whole < 0.75:
        key = random.choice(list(answer))
        return frame(honest[:-1] + b", " + text(key) + b": " + text(random.choice(VALUES)) + b"}"), False  # twice
    if whole < 0.8:
        place = random.randrange(len(honest))
        return frame(honest[:place] + bytes([random.choice([0, 0x80, 0xC0, 0xFF])]) + honest[place + 1 :]), False
    if whole < 0.83:
        error = {"type": "error", "id": answer["id"], "error": random.choice(VALUES), "detail": random.choice(VALUES)}
        return frame(text(error)), False
    if whole < 0.86:
        build = {"type": "build", "language": random.choice(["cuda", "cpp", 7]), "source": random.choice(["#error", 5]),
                 "defines": random.choice([[], 3, [["A"]], [["A", "\0"]], [["-o", "x"]], [["A", "1"]] * 1000])}
        return frame(text(build)), False
    if whole < 0.9:
        deep = b"[" * 100_000
        inside = honest[:-1] + b', "x": ' + deep + b"]" * 100_000 + b"}"
        return frame(random.choice([deep, b'{"a":' * 100_000, inside])), False
    if whole < 0.92:
        return frame(b""), False
    if whole < 0.94:
        return frame(os.urandom(random.randrange(1, 5000))), False
    if whole < 0.96:  # too many
        return random.choice([frame(b"{}") + frame(honest), frame(honest) * 2, frame(honest) * 50]), False
    if whole < 0.98:  # too long
        return struct.pack("!I", random.choice([4 << 20, (4 << 20) + 1, 0xFFFFFFFF])) + honest, True
    return frame(honest)[: random.randrange(1, len(honest) + 4)], True  # cut off


class Forger:
    def __init__(self, channel, op="", fields={}, at=None, seed=0):
        self.channel, self.op, self.fields, self.at, self.seed = channel, op, fields, at, seed
        self.base, self.asked = {}, ""

    def receive(self):
        message = self.channel.receive()
        if message.get("op") == "forge":
            self.at, self.seed, self.base = message["at"], message["seed"], message["base"]
            self.channel.send({"armed": self.seed})
            return self.receive()
        self.asked = message.get("op", self.asked)  # none where a library was built
        return message

    def send(self, answer):
        if self.op and self.op == self.asked and "error" not in answer:
            answer = answer | self.fields
        if self.at is None:
            return self.channel.send(answer)
        self.at -= 1
        if self.at >= 0:
            return self.channel.send(answer)
        self.at = None
        if self.base and answer["type"] == "error":
            answer = {"type": "answer", "id": answer["id"], **self.base}
        data, ends = forged(random.Random(self.seed), answer)
        self.channel.socket.settimeout(10)
        self.channel.socket.sendall(data)
        if ends:
            os._exit(0)


worker = next(thing for thing in gc.get_objects() if isinstance(thing, Worker))
'''


def forging(**how: object) -> str:
    """The kernel's source; `how`: see Forger."""
    return f"{RIGHT}\n{FORGER}\nworker.channel = Forger(worker.channel, **{how!r})\n"
