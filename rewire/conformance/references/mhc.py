"""mHC: manifold-constrained hyper-connections (arXiv 2512.24880).

H starts as n copies of x_0, H [n, D]. Unit t, per token:

    x'     = rms_norm(vec(H))                                           over all n D channels (eq. 7)
    z_pre  = alpha_pre x' phi_pre + b_pre                               [n]
    z_post = alpha_post x' phi_post + b_post                            [n]
    z_res  = alpha_res x' phi_res + b_res                               [n, n]
    H_pre  = sigmoid(z_pre),  H_post = 2 sigmoid(z_post)                (eq. 8)
    H_res  = Sinkhorn-Knopp(z_res)                                      (eq. 8 and 9)
    H'     = H_res H + H_post^T f_t(H_pre H)                            (eq. 3)

H_res[o, i] takes stream i to stream o; its rows sum to 1. The output is the sum of the streams.

Of other models: ``output`` "mean" (GLM-5 Next) or "learned", one more read H_pre H (DeepSeek-V4); ``eps``, added to
H_pre and within Sinkhorn-Knopp (DeepSeek-V4: 1e-6); ``magnitude``, the 2 of H_post. ``residual`` is what H_res is:
"sinkhorn", "identity" (Hunyuan V4, which adds eps to H_post, too), "permutations" (mHC-lite, arXiv 2601.05732),
"cayley" (JPmHC, arXiv 2602.18308), "kronecker" (KromHC, arXiv 2601.21579), "spectral" (sHC, arXiv 2603.20896).
``delayed`` (Single-Pass mHC, DeepSeek-V4.1): unit t reads with the H_pre of unit t - 1, unit 1 stream 0, and a learned
output with that of unit T. ``entry_scales`` (arXiv 2606.03483): stream i starts as s_i * x_0.
"""

import itertools
import math

import torch

DRAWN = {"phi_pre": "normal(0, 0.02)", "phi_post": "normal(0, 0.02)", "phi_res": "normal(0, 0.02)"}
DRAWN["s"] = "0.6 + uniform(-b, b), b = sqrt(6 / (n + D))"


def parameters(
    depth, width, attention=(), *, streams=4, output="sum", residual="sinkhorn", delayed=False, entry_scales=False,
    **options
):
    """The scales are those of the paper, the others those of DeepSeek-V4's code; the paper does not give them."""
    n, f64 = streams, torch.float64
    columns = {"sinkhorn": (n, n), "permutations": (math.factorial(n),), "cayley": (n * (n - 1) // 2,)}
    columns["kronecker"], columns["spectral"] = (2 * (n.bit_length() - 1),), ((n - 1) ** 2,)
    sizes = {"pre": (n,), "post": (n,)} | ({"res": columns[residual]} if residual in columns else {})
    found = {f"alpha_{kind}": torch.full((depth,), 0.01, dtype=f64) for kind in sizes}
    found |= {f"b_{kind}": torch.zeros(depth, *size, dtype=f64) for kind, size in sizes.items()}
    found |= {f"phi_{kind}": torch.full((depth, n * width, *size), math.nan, dtype=f64) for kind, size in sizes.items()}
    if residual == "identity":
        found["b_pre"] += math.log(1 / (n - 1))  # H_pre is 1/n, as in Hunyuan V4
    if residual == "spectral":
        found["b_res"][:, 1 - n :] = 4.0
    if entry_scales:
        found["s"] = torch.full((n, width), math.nan, dtype=f64)
    if output == "learned" and not delayed:
        found["last_alpha"] = torch.full((1,), 0.01, dtype=f64)
        found["last_b"] = found["b_pre"][0].clone()
        found["last_phi"] = torch.full((n * width, n), math.nan, dtype=f64)
    return found


def forward(
    x, weights, branches, kept, *, streams=4, output="sum", iterations=20, residual="sinkhorn", magnitude=2.0,
    eps=0.0, norm_eps=1e-6, delayed=False, entry_scales=False
):
    n, tokens = streams, range(len(x))
    waiting = [torch.eye(n, dtype=x.dtype)[0] for _ in tokens]
    H = torch.stack([x] * n, 1)  # [N, n, D]
    if entry_scales:
        H = weights["s"] * H
    for t, branch in enumerate(branches):
        w = {name: value[t] for name, value in weights.items() if not name.startswith(("last", "s"))}
        H_pre, H_post, H_res = [], [], []
        for token in tokens:
            normed = rms_norm(H[token].flatten(), norm_eps)  # eq. 7
            z_pre = w["alpha_pre"] * (normed @ w["phi_pre"]) + w["b_pre"]
            z_post = w["alpha_post"] * (normed @ w["phi_post"]) + w["b_post"]
            H_pre.append(torch.sigmoid(z_pre) + eps)  # eq. 8
            H_post.append(magnitude * torch.sigmoid(z_post) + (eps if residual == "identity" else 0))
            if residual == "identity":
                H_res.append(torch.eye(n, dtype=x.dtype))
                continue
            z_res = w["alpha_res"] * torch.tensordot(normed, w["phi_res"], 1) + w["b_res"]
            if residual == "sinkhorn":
                H_res.append(sinkhorn(z_res, iterations, eps))  # eq. 9
            else:
                H_res.append(globals()[residual](z_res, n))
        if delayed:
            H_pre, waiting = waiting, H_pre
        read = torch.stack([sum(H_pre[token][i] * H[token, i] for i in range(n)) for token in tokens])
        f = branch(read)
        new = []
        for token in tokens:  # eq. 3
            mixed = [sum(H_res[token][o, i] * H[token, i] for i in range(n)) for o in range(n)]
            new.append(torch.stack([mixed[o] + H_post[token][o] * f[token] for o in range(n)]))
        H = kept(torch.stack(new))
    if output == "learned" and delayed:
        return torch.stack([waiting[token] @ H[token] for token in tokens])
    if output == "learned":
        return torch.stack([last_read(H[token], weights, eps, norm_eps) for token in tokens])
    return H.sum(1) if output == "sum" else H.mean(1)


def last_read(H, weights, eps, norm_eps):
    normed = rms_norm(H.flatten(), norm_eps)
    gates = torch.sigmoid(weights["last_alpha"] * (normed @ weights["last_phi"]) + weights["last_b"]) + eps
    return gates @ H


def rms_norm(x, eps):
    return x / torch.sqrt((x**2).mean() + eps)


def sinkhorn(z, iterations, eps):
    """eq. 9: M <- T_r(T_c(M)), T_c dividing columns and T_r rows by their sums, from M = exp(z)."""
    M = torch.exp(z - z.max())  # a factor that the first division removes
    for iteration in range(iterations):
        if iteration == 0:  # DeepSeek-V4 adds eps behind this division, and inside all others
            M = M / M.sum(0, keepdim=True) + eps
        else:
            M = M / (M.sum(0, keepdim=True) + eps)
        M = M / (M.sum(1, keepdim=True) + eps)
    return M


def permutations(z, n):
    """sum_k softmax(z)_k P_k over the permutations in lexicographic order, P[o, order[o]] = 1."""
    shares, total = torch.softmax(z, 0), torch.zeros(n, n, dtype=z.dtype)
    for share, order in zip(shares, itertools.permutations(range(n)), strict=True):
        total = total + share * torch.eye(n, dtype=z.dtype)[list(order)]
    return total


def cayley(z, n):
    """(I - A/2)^-1 (I + A/2), where the skew A has z above its diagonal, row by row."""
    A, eye = torch.zeros(n, n, dtype=z.dtype), torch.eye(n, dtype=z.dtype)
    for value, (i, j) in zip(z, itertools.combinations(range(n), 2), strict=True):
        A = A + value * (torch.outer(eye[i], eye[j]) - torch.outer(eye[j], eye[i]))
    return torch.linalg.solve(eye - A / 2, eye + A / 2)


def kronecker(z, n):
    """Of 2 x 2 matrices p I + (1 - p) S, S swapping two, (p, 1 - p) being a softmax of two values."""
    total = torch.ones(1, 1, dtype=z.dtype)
    for p, q in torch.softmax(z.view(-1, 2), -1):
        total = torch.kron(total, torch.stack([torch.stack([p, q]), torch.stack([q, p])]))
    return total


def spectral(z, n):
    """1/n + Z U diag(s) V^T Z^T: Z has an orthonormal basis of what is at right angles to 1 as columns, U and V are
    (I + A)^-1 (I - A) of skew A; A_U, A_V (row by row above their diagonals) and s are tanh of the values in turn.
    """
    m, eye = n - 1, torch.eye(n - 1, dtype=z.dtype)
    Z, values = torch.zeros(n, m, dtype=z.dtype), list(torch.tanh(z))
    for i in range(1, n):  # Helmert's
        Z[:i, i - 1], Z[i, i - 1] = 1 / math.sqrt(i * (i + 1)), -i / math.sqrt(i * (i + 1))
    rotations = []
    for _ in range(2):
        A = torch.zeros(m, m, dtype=z.dtype)
        for i, j in itertools.combinations(range(m), 2):
            A = A + values.pop(0) * (torch.outer(eye[i], eye[j]) - torch.outer(eye[j], eye[i]))
        rotations.append(torch.linalg.solve(eye + A, eye - A))
    U, V = rotations
    return 1 / n + Z @ U @ torch.diag(torch.stack(values)) @ V.T @ Z.T
