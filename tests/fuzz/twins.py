"""How the twin of a random net is written: the same computation, in the plainest style.

What is not named here is written as in the net itself.
"""

from __future__ import annotations

PLAIN = "x = x + self.f{n}(self.norm{n}(x))"
ATTENTION = "x = x + self.attn{n}(self.norm{n}(x))"
ROWS = "rows = torch.tensor([1])\nx = x + torch.zeros_like(x).index_add(0, rows, self.f{n}(self.norm{n}(x[rows])))"
TOKENS = "h = self.f{n}(self.norm{n}(x[:, 1:]))\nx = x + torch.cat([torch.zeros_like(x[:, :1]), h], 1)"

ADDS = {
    **dict.fromkeys(
        ["branch first", "augmented", "residual", "named branch", "torch.add", "method", "in place", "helper function"],
        PLAIN,
    ),
    **dict.fromkeys(["helper method", "helper module", "wrapped", "cast", "view", "flat stream", "transposed"], PLAIN),
    **dict.fromkeys(["decorated", "decorated method", "static", "to the branch"], PLAIN),
    **dict.fromkeys(["keywords", "partial helper", "conditional expression", "match", "finally"], PLAIN),
    **dict.fromkeys(["grad mode in the branch", "autocast in the branch"], PLAIN),
    **dict.fromkeys(
        ["applied", "applied to a variable", "static method", "method of an object", "class method", "partial"],
        ATTENTION,
    ),
    **dict.fromkeys(["function of a module", "local object", "applied inside", "a tuple", "a list back"], ATTENTION),
    "checkpointed branch": ATTENTION,
    **dict.fromkeys(["rows", "rows in place", "rows assigned", "rows of a part", "rows, index_add_"], ROWS),
    **dict.fromkeys(["rows, index_put_", "rows in a helper"], ROWS),
    **dict.fromkeys(["tokens in place", "tokens assigned"], TOKENS),
    "tokens added to": TOKENS.replace("h = ", "h = 0.5 * "),
    "masked in place": "x = x + self.f{n}(self.norm{n}(x)) * (torch.arange(x.shape[1]) % 2 == 0)[:, None]",
    **dict.fromkeys(["in place without a mask", "a new shortcut without a mask"], PLAIN),
    "if there is a mask": ("h = self.f{n}(self.norm{n}(x))\nx = x + (h if mask is not None else torch.zeros_like(h))"),
    "another branch without a mask": (
        "h = self.f{n}(self.norm{n}(x)) if mask is not None else 0.5 * self.g{n}(x)\nx = x + h"
    ),
    "a mean of short ones": "h = self.f{n}(self.norm{n}(x))\nx = x + (h if x.shape[1] > 3 else h.mean(1, True))",
    "alpha": "x = x + 0.5 * self.f{n}(self.norm{n}(x))",
    "post-activation": "x = torch.relu(x + self.f{n}(x))",
    "parallel sum": "x = x + self.f{n}(self.norm{n}(x)) + self.g{n}(x)",
    "parallel in statements": "x = x + self.f{n}(self.norm{n}(x)) + self.g{n}(self.norm{n}(x))",
    "helper with the branch": "x = x + self.sub{n}.fn(self.sub{n}.norm(x))",
    "loop": "x = x + self.f{n}(self.norm{n}(x))\nx = x + self.g{n}(self.norm{n}(x))",
    "two places": "x = x + self.f{n}(self.norm{n}(x)) * (0.5 if self.training else 1.0)",
}

ASIDES = dict.fromkeys(
    [
        *("counts", "logs", "attribute", "detached attribute", "try", "assert", "cast there and back", "contiguous"),
        *("clone", "folded"),
    ],
    "",
) | {
    "is tensor": "if mask is not None:\n    x = x * mask",
    "isinstance": "x = x * 2.0",
    "kwargs": "x = x * 1.0",
    "lambda": "x = x * 0.5",
    "a local class": "x = x * 0.5",
    "comprehension": "x = x * 1.0",
    "scale without a mask": "x = x * (1.0 if mask is not None else 0.5)",
}

_LOOP = "for block in self.blocks:\n    x = block(x, mask)"

BODIES = {
    **dict.fromkeys(["indices", "keeps", "checkpoint", "asks"], _LOOP),
    **dict.fromkeys(["keywords", "partials", "while", "in a list", "forwards", "reduce"], _LOOP),
    "returns": f"{_LOOP}\nreturn self.head(x)",
    "sequential": "for block in self.blocks:\n    x = block(x)",
    "if tensor": "for block in self.blocks:\n    x = block(x, mask)\n    x = x * 0.8",
}
