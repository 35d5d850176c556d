"""Tables, sets, graphs and proteins, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B905, E741, N803, N806, RUF059, SIM108, UP031
# mypy: ignore-errors

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wild.parts import HEADS, VOCAB, WIDTH, Attention, Mlp, adjacency, image, sequence, tokens


class FTTransformer(nn.Module):
    def __init__(self, n_layers=3, d_token=WIDTH, prenormalization=True, residual_dropout=0.1):
        super().__init__()
        self.tokenizer = nn.Parameter(torch.randn(5, d_token))
        self.layers = nn.ModuleList([])
        for layer_idx in range(n_layers):
            layer = nn.ModuleDict(
                {
                    "attention": Attention(d_token),
                    "linear0": nn.Linear(d_token, 2 * d_token),
                    "linear1": nn.Linear(d_token, d_token),
                    "norm1": nn.LayerNorm(d_token),
                }
            )
            if not prenormalization or layer_idx:
                layer["norm0"] = nn.LayerNorm(d_token)
            self.layers.append(layer)
        self.activation = lambda x: F.glu(x, dim=-1)
        self.last_normalization = nn.LayerNorm(d_token) if prenormalization else None
        self.prenormalization = prenormalization
        self.residual_dropout = residual_dropout
        self.head = nn.Linear(d_token, 1)

    def _start_residual(self, x, layer, norm_idx):
        x_residual = x
        if self.prenormalization:
            norm_key = f"norm{norm_idx}"
            if norm_key in layer:
                x_residual = layer[norm_key](x_residual)
        return x_residual

    def _end_residual(self, x, x_residual, layer, norm_idx):
        if self.residual_dropout:
            x_residual = F.dropout(x_residual, self.residual_dropout, self.training)
        x = x + x_residual
        if not self.prenormalization:
            x = layer[f"norm{norm_idx}"](x)
        return x

    def forward(self, x_num):
        x = x_num[..., None] * self.tokenizer[None]
        for layer_idx, layer in enumerate(self.layers):
            is_last_layer = layer_idx + 1 == len(self.layers)
            x_residual = self._start_residual(x, layer, 0)
            x_residual = layer["attention"](x_residual[:, :1] if is_last_layer else x_residual, x_residual)
            if is_last_layer:
                x = x[:, : x_residual.shape[1]]
            x = self._end_residual(x, x_residual, layer, 0)
            x_residual = self._start_residual(x, layer, 1)
            x_residual = layer["linear0"](x_residual)
            x_residual = self.activation(x_residual)
            x_residual = layer["linear1"](x_residual)
            x = self._end_residual(x, x_residual, layer, 1)
        x = x[:, 0]
        if self.last_normalization is not None:
            x = self.last_normalization(x)
        x = self.head(x)
        x = x.squeeze(-1)
        return x


class TabularResNet(nn.Module):
    def __init__(self, n_layers=3, d=WIDTH):
        super().__init__()
        self.first_layer = nn.Linear(5, d)
        self.layers = nn.ModuleList(
            [
                nn.ModuleDict(
                    {"norm": nn.BatchNorm1d(d), "linear0": nn.Linear(d, 2 * d), "linear1": nn.Linear(2 * d, d)}
                )
                for _ in range(n_layers)
            ]
        )
        self.main_activation = F.relu
        self.last_norm, self.head = nn.BatchNorm1d(d), nn.Linear(d, 1)
        self.hidden_dropout = 0.0

    def forward(self, x):
        x = self.first_layer(x)
        for layer in self.layers:
            z = x
            z = layer["norm"](z)
            z = layer["linear0"](z)
            z = self.main_activation(z)
            if self.hidden_dropout:
                z = F.dropout(z, self.hidden_dropout, self.training)
            z = layer["linear1"](z)
            x = x + z
        x = self.last_norm(x)
        x = self.main_activation(x)
        x = self.head(x)
        x = x.squeeze(-1)
        return x


class ResidualMLP(nn.Module):
    """MLP with skip connections in a plain Sequential, flattened input, and checkpointing by a flag."""

    class ResBlock(nn.Module):
        def __init__(self, dim, dropout=0.1):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Dropout(dropout))

        def forward(self, x):
            return F.relu(x + self.block(x))

    def __init__(self, use_checkpoint, depth=3):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.stem = nn.Linear(3 * 8 * 8, WIDTH)
        self.blocks = nn.ModuleList([self.ResBlock(WIDTH) for _ in range(depth)])

    def forward(self, x):
        x = self.stem(torch.flatten(x, 1))
        for blk in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(blk, x, use_reentrant=False)
            else:
                x = blk(x)
        return x


class StochasticDepthNet(nn.Module):
    """A residual net whose blocks are dropped per sample in training."""

    class DropPath(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p

        def forward(self, x):
            if self.p == 0.0 or not self.training:
                return x
            keep_prob = 1 - self.p
            shape = (x.shape[0],) + (1,) * (x.ndim - 1)
            random_tensor = keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)
            random_tensor.floor_()
            output = x.div(keep_prob) * random_tensor
            return output

    def __init__(self, depth=4, rate=0.3):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(depth)])
        self.mlps = nn.ModuleList([Mlp() for _ in range(depth)])
        self.drops = nn.ModuleList([self.DropPath(rate * i / depth) for i in range(depth)])

    def forward(self, x):
        for norm, mlp, drop in zip(self.norms, self.mlps, self.drops):
            x = x + drop(mlp(norm(x)))
        return x


class MAB(nn.Module):
    def __init__(self, dim_Q, dim_K, dim_V, num_heads, ln=False):
        super().__init__()
        self.dim_V, self.num_heads = dim_V, num_heads
        self.fc_q, self.fc_k, self.fc_v = nn.Linear(dim_Q, dim_V), nn.Linear(dim_K, dim_V), nn.Linear(dim_K, dim_V)
        if ln:
            self.ln0 = nn.LayerNorm(dim_V)
            self.ln1 = nn.LayerNorm(dim_V)
        self.fc_o = nn.Linear(dim_V, dim_V)

    def forward(self, Q, K):
        Q = self.fc_q(Q)
        K, V = self.fc_k(K), self.fc_v(K)
        dim_split = self.dim_V // self.num_heads
        Q_ = torch.cat(Q.split(dim_split, 2), 0)
        K_ = torch.cat(K.split(dim_split, 2), 0)
        V_ = torch.cat(V.split(dim_split, 2), 0)
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(self.dim_V), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)
        O = O if getattr(self, "ln0", None) is None else self.ln0(O)
        O = O + F.relu(self.fc_o(O))
        O = O if getattr(self, "ln1", None) is None else self.ln1(O)
        return O


class SAB(nn.Module):
    def __init__(self, dim_in, dim_out, num_heads, ln=False):
        super().__init__()
        self.mab = MAB(dim_in, dim_in, dim_out, num_heads, ln=ln)

    def forward(self, X):
        return self.mab(X, X)


class PMA(nn.Module):
    def __init__(self, dim, num_heads, num_seeds, ln=False):
        super().__init__()
        self.S = nn.Parameter(torch.randn(1, num_seeds, dim))
        self.mab = MAB(dim, dim, dim, num_heads, ln=ln)

    def forward(self, X):
        return self.mab(self.S.repeat(X.size(0), 1, 1), X)


class SetTransformer(nn.Module):
    def __init__(self, ln=True):
        super().__init__()
        self.enc = nn.Sequential(SAB(3, WIDTH, HEADS, ln=ln), SAB(WIDTH, WIDTH, HEADS, ln=ln))
        self.dec = nn.Sequential(PMA(WIDTH, HEADS, 2, ln=ln), SAB(WIDTH, WIDTH, HEADS, ln=ln), nn.Linear(WIDTH, 4))

    def forward(self, X):
        return self.dec(self.enc(X))


class PointTransformerLayer(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(planes, planes) for _ in range(3))
        self.linear_p = nn.Linear(3, planes)

    def forward(self, pxo):
        p, x, o = pxo
        x_q, x_k, x_v = self.linear_q(x), self.linear_k(x), self.linear_v(x)
        p_r = self.linear_p(p[:, None] - p[None])
        w = torch.softmax(x_k[None] - x_q[:, None] + p_r, dim=1)
        return ((x_v[None] + p_r) * w).sum(1)


class PointTransformerBlock(nn.Module):
    def __init__(self, planes=WIDTH):
        super().__init__()
        self.linear1, self.bn1 = nn.Linear(planes, planes, bias=False), nn.BatchNorm1d(planes)
        self.transformer2, self.bn2 = PointTransformerLayer(planes), nn.BatchNorm1d(planes)
        self.linear3, self.bn3 = nn.Linear(planes, planes, bias=False), nn.BatchNorm1d(planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, pxo):
        p, x, o = pxo
        identity = x
        x = self.relu(self.bn1(self.linear1(x)))
        x = self.relu(self.bn2(self.transformer2([p, x, o])))
        x = self.bn3(self.linear3(x))
        x += identity
        x = self.relu(x)
        return [p, x, o]


class PointTransformerDown(nn.Module):
    def __init__(self, in_planes, out_planes):
        super().__init__()
        self.linear, self.bn = nn.Linear(in_planes, out_planes, bias=False), nn.BatchNorm1d(out_planes)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, pxo):
        p, x, o = pxo
        x = self.relu(self.bn(self.linear(x)))
        return [p, x, o]


class PointTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Sequential(PointTransformerDown(6, WIDTH), *[PointTransformerBlock() for _ in range(3)])
        self.cls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))

    def forward(self, p0, x0, o0):
        x0 = torch.cat((p0, x0), 1)
        p1, x1, o1 = self.enc1([p0, x0, o0])
        return self.cls(x1)


class PointMLPResBlock(nn.Module):
    def __init__(self, channel, res_expansion=1.0):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.net1 = nn.Sequential(
            nn.Conv1d(channel, int(channel * res_expansion), 1), nn.BatchNorm1d(channel), nn.ReLU(inplace=True)
        )
        self.net2 = nn.Sequential(nn.Conv1d(int(channel * res_expansion), channel, 1), nn.BatchNorm1d(channel))

    def forward(self, x):
        return self.act(self.net2(self.net1(x)) + x)


class PointMLP(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embedding = nn.Conv1d(3, WIDTH, 1)
        operation = []
        for _ in range(blocks):
            operation.append(PointMLPResBlock(WIDTH))
        self.operation = nn.Sequential(*operation)

    def forward(self, x):
        x = self.embedding(x.permute(0, 2, 1))
        x = self.operation(x)
        x = F.adaptive_max_pool1d(x, 1).squeeze(dim=-1)
        return x


class GraphBatch(SimpleNamespace):
    pass


class DenseGCN(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x, adj):
        return self.lin(adj @ x)


class GPSLayer(nn.Module):
    def __init__(self, dim_h=WIDTH, dropout=0.0):
        super().__init__()
        self.local_model, self.self_attn = DenseGCN(dim_h), Attention(dim_h)
        self.norm1_local, self.norm1_attn, self.norm2 = (nn.LayerNorm(dim_h) for _ in range(3))
        self.dropout_local, self.dropout_attn = nn.Dropout(dropout), nn.Dropout(dropout)
        self.ff_linear1, self.ff_linear2 = nn.Linear(dim_h, 2 * dim_h), nn.Linear(2 * dim_h, dim_h)
        self.act_fn_ff = nn.ReLU()

    def forward(self, batch):
        h = batch.x
        h_in1 = h
        h_out_list = []
        if self.local_model is not None:
            h_local = self.local_model(h, batch.adj)
            h_local = self.dropout_local(h_local)
            h_local = h_in1 + h_local
            h_local = self.norm1_local(h_local)
            h_out_list.append(h_local)
        if self.self_attn is not None:
            h_attn = self.self_attn(h)
            h_attn = self.dropout_attn(h_attn)
            h_attn = h_in1 + h_attn
            h_attn = self.norm1_attn(h_attn)
            h_out_list.append(h_attn)
        h = sum(h_out_list)
        h = h + self._ff_block(h)
        h = self.norm2(h)
        batch.x = h
        return batch

    def _ff_block(self, x):
        return self.ff_linear2(self.act_fn_ff(self.ff_linear1(x)))


class GraphGPS(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.encoder = nn.Linear(3, WIDTH)
        self.layers = torch.nn.Sequential(*[GPSLayer() for _ in range(layers)])
        self.post_mp = nn.Linear(WIDTH, 1)

    def forward(self, x, adj):
        batch = GraphBatch(x=self.encoder(x), adj=adj)
        for module in self.layers:
            batch = module(batch)
        return self.post_mp(batch.x.mean(1))


class GatedGCN(nn.Module):
    """benchmarking-gnns: node and edge streams, both residual."""

    def __init__(self, dim=WIDTH, residual=True):
        super().__init__()
        self.A, self.B, self.C, self.D, self.E = (nn.Linear(dim, dim) for _ in range(5))
        self.bn_node_h, self.bn_node_e = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.residual, self.batch_norm, self.dropout = residual, True, 0.0

    def forward(self, g, h, e):
        h_in = h
        e_in = e
        Ah, Bh, Dh, Eh, Ce = self.A(h), self.B(h), self.D(h), self.E(h), self.C(e)
        e = Dh.unsqueeze(2) + Eh.unsqueeze(1) + Ce
        sigma = torch.sigmoid(e) * g.unsqueeze(-1)
        h = Ah + (sigma * Bh.unsqueeze(1)).sum(2) / (sigma.sum(2) + 1e-6)
        if self.batch_norm:
            h = self.bn_node_h(h)
            e = self.bn_node_e(e)
        h = F.relu(h)
        e = F.relu(e)
        if self.residual:
            h = h_in + h
            e = e_in + e
        h = F.dropout(h, self.dropout, training=self.training)
        e = F.dropout(e, self.dropout, training=self.training)
        return h, e


class GatedGCNNet(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        self.embedding_h, self.embedding_e = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList([GatedGCN() for _ in range(n_layers)])

    def forward(self, g, h):
        e = self.embedding_e(g.unsqueeze(-1))
        h = self.embedding_h(h)
        for conv in self.layers:
            h, e = conv(g, h, e)
        return h.mean(1)


class EGNNLayer(nn.Module):
    def __init__(self, dim=WIDTH, residual=True):
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(2 * dim + 1, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.node_mlp = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.coord_mlp = nn.Linear(dim, 1, bias=False)
        self.residual = residual

    def coord2radial(self, coord):
        coord_diff = coord.unsqueeze(2) - coord.unsqueeze(1)
        return coord_diff.pow(2).sum(-1, keepdim=True), coord_diff

    def edge_model(self, source, target, radial):
        n = source.shape[1]
        pair = [source.unsqueeze(2).expand(-1, -1, n, -1), target.unsqueeze(1).expand(-1, n, -1, -1), radial]
        return self.edge_mlp(torch.cat(pair, dim=-1))

    def node_model(self, x, edge_attr):
        agg = edge_attr.sum(2)
        agg = torch.cat([x, agg], dim=-1)
        out = self.node_mlp(agg)
        if self.residual:
            out = x + out
        return out, agg

    def coord_model(self, coord, coord_diff, edge_feat):
        trans = coord_diff * self.coord_mlp(edge_feat)
        coord = coord + trans.mean(2)
        return coord

    def forward(self, h, coord):
        radial, coord_diff = self.coord2radial(coord)
        edge_feat = self.edge_model(h, h, radial)
        coord = self.coord_model(coord, coord_diff, edge_feat)
        h, agg = self.node_model(h, edge_feat)
        return h, coord


class EGNN(nn.Module):
    def __init__(self, n_layers=3):
        super().__init__()
        self.n_layers = n_layers
        self.embedding_in, self.embedding_out = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        for i in range(0, n_layers):
            self.add_module("gcl_%d" % i, EGNNLayer())

    def forward(self, h, x):
        h = self.embedding_in(h)
        for i in range(0, self.n_layers):
            h, x = self._modules["gcl_%d" % i](h, x)
        h = self.embedding_out(h)
        return h, x


class SchNetInteraction(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.mlp, self.lin1, self.lin2 = nn.Linear(1, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.act, self.lin = nn.Softplus(), nn.Linear(dim, dim)

    def forward(self, x, dist):
        W = self.mlp(dist.unsqueeze(-1))
        x = (self.lin1(x).unsqueeze(1) * W).sum(2)
        x = self.lin2(x)
        x = self.act(x)
        return self.lin(x)


class SchNet(nn.Module):
    def __init__(self, num_interactions=3):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, padding_idx=0)
        self.interactions = nn.ModuleList()
        for _ in range(num_interactions):
            self.interactions.append(SchNetInteraction())
        self.lin1, self.lin2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, z, pos, batch=None):
        dist = (pos.unsqueeze(2) - pos.unsqueeze(1)).pow(2).sum(-1)
        h = self.embedding(z)
        for interaction in self.interactions:
            h = h + interaction(h, dist)
        h = self.lin1(h)
        h = F.softplus(h)
        h = self.lin2(h)
        return h.sum(1)


class PairBiasAttention(nn.Module):
    def __init__(self, dim=WIDTH, pair_dim=WIDTH):
        super().__init__()
        self.norm, self.attn, self.to_bias = nn.LayerNorm(dim), Attention(dim), nn.Linear(pair_dim, HEADS)

    def forward(self, m, z):
        return self.attn(self.norm(m), mask=self.to_bias(z).permute(0, 3, 1, 2).unsqueeze(1))


class ColumnAttention(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim)

    def forward(self, m):
        return self.attn(self.norm(m.transpose(1, 2))).transpose(1, 2)


class OuterProductMean(nn.Module):
    def __init__(self, dim=WIDTH, hidden=4):
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.proj_out = nn.Linear(hidden * hidden, dim)

    def forward(self, m):
        m = self.norm(m)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(m), self.right(m)) / m.shape[1]
        return self.proj_out(outer.flatten(-2))


class TriangleMultiplication(nn.Module):
    def __init__(self, dim=WIDTH, outgoing=True):
        super().__init__()
        self.norm, self.to_out = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.left, self.right, self.gate = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mix = "bikd,bjkd->bijd" if outgoing else "bkid,bkjd->bijd"

    def forward(self, z):
        z = self.norm(z)
        out = torch.einsum(self.mix, self.left(z), self.right(z))
        return self.to_out(out) * self.gate(z).sigmoid()


class Transition(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), Mlp(dim))

    def forward(self, x):
        return self.net(x)


class EvoformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.row_attn, self.col_attn, self.msa_ff = PairBiasAttention(), ColumnAttention(), Transition()
        self.outer_mean = OuterProductMean()
        self.triangle_out, self.triangle_in = TriangleMultiplication(), TriangleMultiplication(outgoing=False)
        self.pair_ff = Transition()

    def forward(self, inputs):
        m, z = inputs
        m = m + self.row_attn(m, z)
        m = m + self.col_attn(m)
        m = m + self.msa_ff(m)
        z = z + self.outer_mean(m)
        z = z + self.triangle_out(z)
        z = z + self.triangle_in(z)
        z = z + self.pair_ff(z)
        return m, z


class Evoformer(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList([EvoformerBlock() for _ in range(depth)])

    def forward(self, m, z):
        inp = (m, z)
        for layer in self.layers:
            inp = layer(inp)
        m, z = inp
        return m, z


def openfold_add(m1, m2, inplace):
    if not inplace:
        m1 = m1 + m2
    else:
        m1 += m2
    return m1


class OpenFoldBlock(nn.Module):
    def __init__(self, opm_first=False):
        super().__init__()
        self.msa_att_row, self.msa_att_col, self.msa_transition = PairBiasAttention(), ColumnAttention(), Transition()
        self.msa_dropout_layer = nn.Dropout(0.0)
        self.outer_product_mean = OuterProductMean()
        self.tri_mul_out, self.tri_mul_in = TriangleMultiplication(), TriangleMultiplication(outgoing=False)
        self.pair_transition = Transition()
        self.opm_first = opm_first

    def forward(self, m: Tensor | None, z: Tensor | None, inplace_safe: bool = False):
        m = openfold_add(m, self.msa_dropout_layer(self.msa_att_row(m, z=z)), inplace=inplace_safe)
        m = openfold_add(m, self.msa_att_col(m), inplace=inplace_safe)
        m = openfold_add(m, self.msa_transition(m), inplace=inplace_safe)
        z = openfold_add(z, self.outer_product_mean(m), inplace=inplace_safe)
        z = openfold_add(z, self.msa_dropout_layer(self.tri_mul_out(z)), inplace=inplace_safe)
        z = openfold_add(z, self.msa_dropout_layer(self.tri_mul_in(z)), inplace=inplace_safe)
        z = openfold_add(z, self.pair_transition(z), inplace=inplace_safe)
        return m, z


class OpenFoldStack(nn.Module):
    def __init__(self, no_blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(no_blocks):
            self.blocks.append(OpenFoldBlock())
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.blocks_per_ckpt = None

    def _prep_blocks(self, inplace_safe):
        return [partial(b, inplace_safe=inplace_safe) for b in self.blocks]

    def forward(self, m, z, inplace_safe=False):
        blocks = self._prep_blocks(inplace_safe)
        a = (m, z)
        for b in blocks:
            a = b(*a)
        m, z = a
        s = self.linear(m[..., 0, :, :])
        return m, z, s


class ESMLayer(nn.Module):
    def __init__(self, dim=WIDTH):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, HEADS)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, self_attn_mask=None, self_attn_padding_mask=None, need_head_weights=False):
        residual = x
        x = self.self_attn_layer_norm(x)
        x, attn = self.self_attn(
            query=x,
            key=x,
            value=x,
            key_padding_mask=self_attn_padding_mask,
            need_weights=True,
            average_attn_weights=not need_head_weights,
            attn_mask=self_attn_mask,
        )
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = F.gelu(self.fc1(x))
        x = self.fc2(x)
        x = residual + x
        return x, attn


class ESM2(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.num_layers = num_layers
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList([ESMLayer() for _ in range(self.num_layers)])
        self.emb_layer_norm_after = nn.LayerNorm(WIDTH)

    def forward(self, tokens, repr_layers=(3,), need_head_weights=False):
        assert tokens.ndim == 2
        padding_mask = tokens.eq(1)
        x = self.embed_tokens(tokens)
        if padding_mask is not None:
            x = x * (1 - padding_mask.unsqueeze(-1).type_as(x))
        repr_layers = set(repr_layers)
        hidden_representations = {}
        if 0 in repr_layers:
            hidden_representations[0] = x
        x = x.transpose(0, 1)
        if not padding_mask.any():
            padding_mask = None
        for layer_idx, layer in enumerate(self.layers):
            x, attn = layer(x, self_attn_padding_mask=padding_mask, need_head_weights=need_head_weights)
            if (layer_idx + 1) in repr_layers:
                hidden_representations[layer_idx + 1] = x.transpose(0, 1)
        x = self.emb_layer_norm_after(x)
        x = x.transpose(0, 1)
        if (layer_idx + 1) in repr_layers:
            hidden_representations[layer_idx + 1] = x
        return {"logits": x, "representations": hidden_representations}


WILD = {
    "FT-Transformer": lambda: (FTTransformer(), (sequence(4, 5),)),
    "FT-Transformer post-norm": lambda: (FTTransformer(prenormalization=False), (sequence(4, 5),)),
    "rtdl ResNet": lambda: (TabularResNet(), (sequence(4, 5),)),
    "residual MLP": lambda: (ResidualMLP(use_checkpoint=False), (image(),)),
    "residual MLP checkpointed": lambda: (ResidualMLP(use_checkpoint=True), (image(),)),
    "stochastic depth": lambda: (StochasticDepthNet(), (sequence(),)),
    "Set Transformer": lambda: (SetTransformer(), (sequence(2, 5, 3),)),
    "Point Transformer": lambda: (PointTransformer(), (sequence(10, 3), sequence(10, 3), torch.tensor([10]))),
    "PointMLP": lambda: (PointMLP(), (sequence(2, 10, 3),)),
    "GraphGPS": lambda: (GraphGPS(), (sequence(2, 6, 3), adjacency())),
    "GatedGCN": lambda: (GatedGCNNet(), (adjacency(), sequence(2, 6, 3))),
    "EGNN": lambda: (EGNN(), (sequence(2, 6, 3), sequence(2, 6, 3))),
    "SchNet": lambda: (SchNet(), (torch.randint(1, 10, (2, 6)), sequence(2, 6, 3))),
    "Evoformer": lambda: (Evoformer(), (sequence(2, 3, 5, WIDTH), sequence(2, 5, 5, WIDTH))),
    "OpenFold": lambda: (OpenFoldStack(), (sequence(2, 3, 5, WIDTH), sequence(2, 5, 5, WIDTH))),
    "ESM-2": lambda: (ESM2(), (tokens(),)),
}
