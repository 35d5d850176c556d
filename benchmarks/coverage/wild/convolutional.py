"""Convolutional networks, as people write them: see the package."""

# Style rules that code in the wild does not follow.
# ruff: noqa: B905, N803, N806, RUF021, RUF059, SIM108
# ruff: noqa: UP034
# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from models import EDSR
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wild.parts import WIDTH, Attention, DropPath, Mlp, image
from wild.vision import window_partition, window_reverse


class KuangliuBasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion * planes, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion * planes),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class KuangliuBottleneck(nn.Module):
    """ResNeXt's, too: groups."""

    expansion = 2

    def __init__(self, in_planes, planes, stride=1, cardinality=4):
        super().__init__()
        width = planes
        self.conv1 = nn.Conv2d(in_planes, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=cardinality, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, self.expansion * width, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(self.expansion * width)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != self.expansion * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, self.expansion * width, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(self.expansion * width),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class KuangliuPreActBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        if stride != 1 or in_planes != self.expansion * planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, self.expansion * planes, 1, stride=stride, bias=False))

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = self.shortcut(out) if hasattr(self, "shortcut") else x
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        out += shortcut
        return out


class SEPreActBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride=stride), nn.BatchNorm2d(planes))
        self.fc1 = nn.Conv2d(planes, planes // 4, kernel_size=1)
        self.fc2 = nn.Conv2d(planes // 4, planes, kernel_size=1)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        w = F.avg_pool2d(out, out.size(2))
        w = F.relu(self.fc1(w))
        w = F.sigmoid(self.fc2(w))
        out = out * w
        out += self.shortcut(x)
        out = F.relu(out)
        return out


class KuangliuResNet(nn.Module):
    def __init__(self, block, num_blocks=(2, 3), num_classes=10):
        super().__init__()
        self.in_planes = WIDTH
        self.conv1 = nn.Conv2d(3, WIDTH, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.layer1 = self._make_layer(block, WIDTH, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(block, 2 * WIDTH, num_blocks[1], stride=2)
        self.linear = nn.Linear(2 * WIDTH * block.expansion, num_classes)

    def _make_layer(self, block, planes, num_blocks, stride):
        strides = [stride] + [1] * (num_blocks - 1)
        layers = []
        for stride in strides:
            layers.append(block(self.in_planes, planes, stride))
            self.in_planes = planes * block.expansion
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer1(out)
        out = self.layer2(out)
        out = F.avg_pool2d(out, 4)
        out = out.view(out.size(0), -1)
        out = self.linear(out)
        return out


def conv3x3(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)


def conv1x1(in_planes: int, out_planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class TVBasicBlock(nn.Module):
    expansion: int = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class TVBottleneck(nn.Module):
    expansion: int = 2

    def __init__(self, inplanes, planes, stride=1, downsample=None):
        super().__init__()
        self.conv1 = conv1x1(inplanes, planes)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = conv1x1(planes, planes * self.expansion)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)

        out = self.conv3(out)
        out = self.bn3(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class TVResNet(nn.Module):
    def __init__(self, block, layers=(2, 3), num_classes=10):
        super().__init__()
        self.inplanes = WIDTH
        self.conv1 = nn.Conv2d(3, self.inplanes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=1, padding=1)
        self.layer1 = self._make_layer(block, WIDTH, layers[0])
        self.layer2 = self._make_layer(block, 2 * WIDTH, layers[1], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * WIDTH * block.expansion, num_classes)

    def _make_layer(self, block, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * block.expansion, stride), nn.BatchNorm2d(planes * block.expansion)
            )
        layers = [block(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(block(self.inplanes, planes))
        return nn.Sequential(*layers)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class WideBlock(nn.Module):
    def __init__(self, in_planes, out_planes, stride, dropRate=0.0):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_planes)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = conv3x3(in_planes, out_planes, stride)
        self.bn2 = nn.BatchNorm2d(out_planes)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(out_planes, out_planes)
        self.droprate = dropRate
        self.equalInOut = in_planes == out_planes
        self.convShortcut = (not self.equalInOut) and conv1x1(in_planes, out_planes, stride) or None

    def forward(self, x):
        if not self.equalInOut:
            x = self.relu1(self.bn1(x))
        else:
            out = self.relu1(self.bn1(x))
        out = self.relu2(self.bn2(self.conv1(out if self.equalInOut else x)))
        if self.droprate > 0:
            out = F.dropout(out, p=self.droprate, training=self.training)
        out = self.conv2(out)
        return torch.add(x if self.equalInOut else self.convShortcut(x), out)


class WideNetworkBlock(nn.Module):
    def __init__(self, nb_layers, in_planes, out_planes, block, stride, dropRate=0.0):
        super().__init__()
        self.layer = self._make_layer(block, in_planes, out_planes, nb_layers, stride, dropRate)

    def _make_layer(self, block, in_planes, out_planes, nb_layers, stride, dropRate):
        layers = []
        for i in range(int(nb_layers)):
            layers.append(block((i == 0 and in_planes) or out_planes, out_planes, (i == 0 and stride) or 1, dropRate))
        return nn.Sequential(*layers)

    def forward(self, x):
        return self.layer(x)


class WideResNet(nn.Module):
    def __init__(self, n=3, dropRate=0.3):
        super().__init__()
        self.conv1 = conv3x3(3, WIDTH)
        self.block1 = WideNetworkBlock(n, WIDTH, WIDTH, WideBlock, 1, dropRate)
        self.block2 = WideNetworkBlock(n, WIDTH, 2 * WIDTH, WideBlock, 2, dropRate)
        self.bn1 = nn.BatchNorm2d(2 * WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(2 * WIDTH, 10)
        self.nChannels = 2 * WIDTH

    def forward(self, x):
        out = self.conv1(x)
        out = self.block1(out)
        out = self.block2(out)
        out = self.relu(self.bn1(out))
        out = F.avg_pool2d(out, 4)
        out = out.view(-1, self.nChannels)
        return self.fc(out)


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio=2):
        super().__init__()
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        self.conv = nn.Sequential(
            nn.Conv2d(inp, hidden_dim, 1, bias=False),
            nn.BatchNorm2d(hidden_dim),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden_dim, hidden_dim, 3, stride, 1, groups=hidden_dim, bias=False),
            nn.BatchNorm2d(hidden_dim),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden_dim, oup, 1, bias=False),
            nn.BatchNorm2d(oup),
        )

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        else:
            return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = [nn.Conv2d(3, WIDTH, 3, 1, 1)]
        for t, c, n, s in [(2, WIDTH, 3, 1), (2, 24, 3, 2)]:
            for i in range(n):
                prev = WIDTH if c == WIDTH or i == 0 else c
                self.features.append(InvertedResidual(prev, c, s if i == 0 else 1, expand_ratio=t))
        self.features = nn.Sequential(*self.features)
        self.classifier = nn.Linear(24, 10)

    def forward(self, x):
        x = self.features(x)
        x = x.mean(3).mean(2)
        x = self.classifier(x)
        return x


def drop_connect(inputs, p, training):
    if not training:
        return inputs
    batch_size = inputs.shape[0]
    keep_prob = 1 - p
    random_tensor = keep_prob
    random_tensor += torch.rand([batch_size, 1, 1, 1], dtype=inputs.dtype, device=inputs.device)
    binary_tensor = torch.floor(random_tensor)
    return inputs / keep_prob * binary_tensor


class MBConvBlock(nn.Module):
    def __init__(self, block_args):
        super().__init__()
        self._block_args = block_args
        self.has_se = block_args.se_ratio is not None and 0 < block_args.se_ratio <= 1
        self.id_skip = block_args.id_skip
        inp, oup = block_args.input_filters, block_args.output_filters
        hidden = inp * block_args.expand_ratio
        if block_args.expand_ratio != 1:
            self._expand_conv, self._bn0 = nn.Conv2d(inp, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self._depthwise_conv = nn.Conv2d(hidden, hidden, 3, block_args.stride, 1, groups=hidden, bias=False)
        self._bn1 = nn.BatchNorm2d(hidden)
        if self.has_se:
            self._se_reduce, self._se_expand = nn.Conv2d(hidden, 4, 1), nn.Conv2d(4, hidden, 1)
        self._project_conv, self._bn2 = nn.Conv2d(hidden, oup, 1, bias=False), nn.BatchNorm2d(oup)
        self._swish = nn.SiLU()

    def forward(self, inputs, drop_connect_rate=None):
        x = inputs
        if self._block_args.expand_ratio != 1:
            x = self._expand_conv(inputs)
            x = self._bn0(x)
            x = self._swish(x)
        x = self._depthwise_conv(x)
        x = self._bn1(x)
        x = self._swish(x)
        if self.has_se:
            x_squeezed = F.adaptive_avg_pool2d(x, 1)
            x_squeezed = self._se_reduce(x_squeezed)
            x_squeezed = self._swish(x_squeezed)
            x_squeezed = self._se_expand(x_squeezed)
            x = torch.sigmoid(x_squeezed) * x
        x = self._project_conv(x)
        x = self._bn2(x)
        input_filters, output_filters = self._block_args.input_filters, self._block_args.output_filters
        if self.id_skip and self._block_args.stride == 1 and input_filters == output_filters:
            if drop_connect_rate:
                x = drop_connect(x, p=drop_connect_rate, training=self.training)
            x = x + inputs
        return x


class EfficientNet(nn.Module):
    def __init__(self, drop_connect_rate=0.2):
        super().__init__()
        self.drop_connect_rate = drop_connect_rate
        self._conv_stem, self._bn0 = nn.Conv2d(3, WIDTH, 3, 1, 1), nn.BatchNorm2d(WIDTH)
        self._blocks = nn.ModuleList([])
        for inp, oup, stride, expand in [
            (16, 16, 1, 1),
            (16, 16, 1, 2),
            (16, 24, 2, 2),
            (24, 24, 1, 2),
            (24, 24, 1, 2),
        ]:
            args = SimpleNamespace(
                input_filters=inp, output_filters=oup, stride=stride, expand_ratio=expand, se_ratio=0.25, id_skip=True
            )
            self._blocks.append(MBConvBlock(args))
        self._fc = nn.Linear(24, 10)
        self._swish = nn.SiLU()

    def extract_features(self, inputs):
        x = self._swish(self._bn0(self._conv_stem(inputs)))
        for idx, block in enumerate(self._blocks):
            drop_connect_rate = self.drop_connect_rate
            if drop_connect_rate:
                drop_connect_rate *= float(idx) / len(self._blocks)
            x = block(x, drop_connect_rate=drop_connect_rate)
        return x

    def forward(self, inputs):
        x = self.extract_features(inputs)
        return self._fc(x.mean((2, 3)))


def default_conv(in_channels, out_channels, kernel_size, bias=True):
    return nn.Conv2d(in_channels, out_channels, kernel_size, padding=(kernel_size // 2), bias=bias)


class CALayer(nn.Module):
    def __init__(self, channel, reduction=4):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_du = nn.Sequential(
            nn.Conv2d(channel, channel // reduction, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channel // reduction, channel, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        y = self.avg_pool(x)
        y = self.conv_du(y)
        return x * y


class RCAB(nn.Module):
    def __init__(self, conv, n_feat):
        super().__init__()
        self.body = nn.Sequential(conv(n_feat, n_feat, 3), nn.ReLU(True), conv(n_feat, n_feat, 3), CALayer(n_feat))

    def forward(self, x):
        res = self.body(x)
        res += x
        return res


class ResidualGroup(nn.Module):
    def __init__(self, conv, n_feat, n_resblocks):
        super().__init__()
        modules_body = [RCAB(conv, n_feat) for _ in range(n_resblocks)]
        modules_body.append(conv(n_feat, n_feat, 3))
        self.body = nn.Sequential(*modules_body)

    def forward(self, x):
        res = self.body(x)
        res += x
        return res


class RCAN(nn.Module):
    def __init__(self, n_resgroups=2, n_resblocks=2, n_feats=WIDTH, conv=default_conv):
        super().__init__()
        self.head = nn.Sequential(conv(3, n_feats, 3))
        self.body = nn.Sequential(
            *[ResidualGroup(conv, n_feats, n_resblocks) for _ in range(n_resgroups)], conv(n_feats, n_feats, 3)
        )
        self.tail = nn.Sequential(conv(n_feats, 3, 3))

    def forward(self, x):
        x = self.head(x)
        res = self.body(x)
        res += x
        x = self.tail(res)
        return x


class ResidualDenseBlock(nn.Module):
    def __init__(self, nf=WIDTH, gc=8):
        super().__init__()
        self.conv1 = nn.Conv2d(nf, gc, 3, 1, 1)
        self.conv2 = nn.Conv2d(nf + gc, gc, 3, 1, 1)
        self.conv3 = nn.Conv2d(nf + 2 * gc, nf, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(negative_slope=0.2, inplace=True)

    def forward(self, x):
        x1 = self.lrelu(self.conv1(x))
        x2 = self.lrelu(self.conv2(torch.cat((x, x1), 1)))
        x3 = self.conv3(torch.cat((x, x1, x2), 1))
        return x3 * 0.2 + x


class RRDB(nn.Module):
    def __init__(self, nf=WIDTH):
        super().__init__()
        self.RDB1, self.RDB2, self.RDB3 = ResidualDenseBlock(nf), ResidualDenseBlock(nf), ResidualDenseBlock(nf)

    def forward(self, x):
        out = self.RDB1(x)
        out = self.RDB2(out)
        out = self.RDB3(out)
        return out * 0.2 + x


class ESRGAN(nn.Module):
    def __init__(self, nb=2, nf=WIDTH):
        super().__init__()
        self.conv_first = nn.Conv2d(3, nf, 3, 1, 1)
        self.RRDB_trunk = nn.Sequential(*[RRDB(nf) for _ in range(nb)])
        self.trunk_conv = nn.Conv2d(nf, nf, 3, 1, 1)
        self.upconv1 = nn.Conv2d(nf, nf, 3, 1, 1)
        self.conv_last = nn.Conv2d(nf, 3, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(negative_slope=0.2, inplace=True)

    def forward(self, x):
        fea = self.conv_first(x)
        trunk = self.trunk_conv(self.RRDB_trunk(fea))
        fea = fea + trunk
        fea = self.lrelu(self.upconv1(F.interpolate(fea, scale_factor=2, mode="nearest")))
        out = self.conv_last(fea)
        return out


class PatchEmbedTokens(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class PatchUnEmbed(nn.Module):
    def forward(self, x, x_size):
        return x.transpose(1, 2).view(x.shape[0], -1, x_size[0], x_size[1])


class SwinIRLayer(nn.Module):
    def __init__(self, dim, shift_size):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim), Mlp(dim)
        self.drop_path = nn.Identity()
        self.shift_size = shift_size

    def forward(self, x, x_size):
        H, W = x_size
        B, L, C = x.shape
        shortcut = x
        x = self.norm1(x)
        x = x.view(B, H, W, C)
        if self.shift_size > 0:
            shifted_x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        else:
            shifted_x = x
        x = window_reverse(self.attn(window_partition(shifted_x, 4).view(-1, 16, C)).view(-1, 4, 4, C), 4, H, W)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        x = x.view(B, H * W, C)
        x = shortcut + self.drop_path(x)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class SwinIRGroup(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.blocks = nn.ModuleList([SwinIRLayer(dim, shift_size=2 * (i % 2)) for i in range(depth)])
        self.downsample = None
        self.use_checkpoint = False

    def forward(self, x, x_size):
        for blk in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(blk, x, x_size, use_reentrant=False)
            else:
                x = blk(x, x_size)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class RSTB(nn.Module):
    def __init__(self, dim=WIDTH, depth=2):
        super().__init__()
        self.residual_group = SwinIRGroup(dim, depth)
        self.conv = nn.Conv2d(dim, dim, 3, 1, 1)
        self.patch_embed = PatchEmbedTokens()
        self.patch_unembed = PatchUnEmbed()

    def forward(self, x, x_size):
        return self.patch_embed(self.conv(self.patch_unembed(self.residual_group(x, x_size), x_size))) + x


class SwinIR(nn.Module):
    def __init__(self, depth=2, embed_dim=WIDTH):
        super().__init__()
        self.conv_first = nn.Conv2d(3, embed_dim, 3, 1, 1)
        self.patch_embed, self.patch_unembed = PatchEmbedTokens(), PatchUnEmbed()
        self.layers = nn.ModuleList([RSTB() for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim)
        self.conv_after_body = nn.Conv2d(embed_dim, embed_dim, 3, 1, 1)
        self.conv_last = nn.Conv2d(embed_dim, 3, 3, 1, 1)

    def forward_features(self, x):
        x_size = (x.shape[2], x.shape[3])
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x, x_size)
        x = self.norm(x)
        x = self.patch_unembed(x, x_size)
        return x

    def forward(self, x):
        x_first = self.conv_first(x)
        res = self.conv_after_body(self.forward_features(x_first)) + x_first
        x = x + self.conv_last(res)
        return x


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NAFBlock(nn.Module):
    def __init__(self, c=WIDTH, drop_out_rate=0.0):
        super().__init__()
        self.conv1, self.conv3 = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)
        self.conv2 = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.sca = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, c, 1))
        self.conv4, self.conv5 = nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)
        self.norm1, self.norm2 = LayerNorm2d(c), LayerNorm2d(c)
        self.dropout1 = nn.Dropout(drop_out_rate) if drop_out_rate > 0.0 else nn.Identity()
        self.dropout2 = nn.Dropout(drop_out_rate) if drop_out_rate > 0.0 else nn.Identity()
        self.beta = nn.Parameter(torch.ones((1, c, 1, 1)), requires_grad=True)
        self.gamma = nn.Parameter(torch.ones((1, c, 1, 1)), requires_grad=True)

    def sg(self, x):
        x1, x2 = x.chunk(2, dim=1)
        return x1 * x2

    def forward(self, inp):
        x = inp
        x = self.norm1(x)
        x = self.conv1(x)
        x = self.conv2(x)
        x = self.sg(x)
        x = x * self.sca(x)
        x = self.conv3(x)
        x = self.dropout1(x)
        y = inp + x * self.beta
        x = self.conv4(self.norm2(y))
        x = self.sg(x)
        x = self.conv5(x)
        x = self.dropout2(x)
        return y + x * self.gamma


class NAFNet(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.intro, self.ending = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.encoders = nn.ModuleList([nn.Sequential(NAFBlock(width), NAFBlock(width))])
        self.downs = nn.ModuleList([nn.Conv2d(width, 2 * width, 2, 2)])
        self.middle_blks = nn.Sequential(*[NAFBlock(2 * width) for _ in range(2)])
        self.ups = nn.ModuleList([nn.Sequential(nn.Conv2d(2 * width, 4 * width, 1, bias=False), nn.PixelShuffle(2))])
        self.decoders = nn.ModuleList([nn.Sequential(NAFBlock(width), NAFBlock(width))])

    def forward(self, inp):
        x = self.intro(inp)
        encs = []
        for encoder, down in zip(self.encoders, self.downs):
            x = encoder(x)
            encs.append(x)
            x = down(x)
        x = self.middle_blks(x)
        for decoder, up, enc_skip in zip(self.decoders, self.ups, encs[::-1]):
            x = up(x)
            x = x + enc_skip
            x = decoder(x)
        x = self.ending(x)
        x = x + inp
        return x


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, drop_path=0.0, layer_scale_init_value=0.5):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = (
            nn.Parameter(layer_scale_init_value * torch.ones(dim), requires_grad=True)
            if layer_scale_init_value > 0
            else None
        )
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.pwconv2(x)
        if self.gamma is not None:
            x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        x = input + self.drop_path(x)
        return x


class GRN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(1, 1, 1, dim))
        self.beta = nn.Parameter(torch.rand(1, 1, 1, dim))

    def forward(self, x):
        Gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        Nx = Gx / (Gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * Nx) + self.beta + x


class ConvNeXtV2Block(nn.Module):
    def __init__(self, dim, drop_path=0.0):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.grn(x)
        x = self.pwconv2(x)
        x = x.permute(0, 3, 1, 2)
        x = input + self.drop_path(x)
        return x


class ConvNeXt(nn.Module):
    def __init__(self, block, depths=(2, 3), dims=(WIDTH, 2 * WIDTH), drop_path_rate=0.0):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        self.downsample_layers.append(nn.Sequential(nn.Conv2d(3, dims[0], 2, 2), LayerNorm2d(dims[0])))
        self.downsample_layers.append(nn.Sequential(LayerNorm2d(dims[0]), nn.Conv2d(dims[0], dims[1], 2, 2)))
        self.stages = nn.ModuleList()
        dp_rates = [x.item() for x in torch.linspace(0, drop_path_rate, sum(depths))]
        cur = 0
        for i in range(2):
            self.stages.append(nn.Sequential(*[block(dims[i], drop_path=dp_rates[cur + j]) for j in range(depths[i])]))
            cur += depths[i]
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], 10)

    def forward_features(self, x):
        for i in range(2):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        return x


class Pooling(nn.Module):
    def __init__(self, pool_size=3):
        super().__init__()
        self.pool = nn.AvgPool2d(pool_size, stride=1, padding=pool_size // 2, count_include_pad=False)

    def forward(self, x):
        return self.pool(x) - x


class PoolFormerBlock(nn.Module):
    def __init__(self, dim, drop_path=0.0, use_layer_scale=True, layer_scale_init_value=0.5):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, dim)
        self.token_mixer = Pooling()
        self.norm2 = nn.GroupNorm(1, dim)
        self.mlp = nn.Sequential(nn.Conv2d(dim, 2 * dim, 1), nn.GELU(), nn.Conv2d(2 * dim, dim, 1))
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.use_layer_scale = use_layer_scale
        if use_layer_scale:
            self.layer_scale_1 = nn.Parameter(layer_scale_init_value * torch.ones((dim)), requires_grad=True)
            self.layer_scale_2 = nn.Parameter(layer_scale_init_value * torch.ones((dim)), requires_grad=True)

    def forward(self, x):
        if self.use_layer_scale:
            x = x + self.drop_path(self.layer_scale_1.unsqueeze(-1).unsqueeze(-1) * self.token_mixer(self.norm1(x)))
            x = x + self.drop_path(self.layer_scale_2.unsqueeze(-1).unsqueeze(-1) * self.mlp(self.norm2(x)))
        else:
            x = x + self.drop_path(self.token_mixer(self.norm1(x)))
            x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class PoolFormer(nn.Module):
    def __init__(self, fork_feat=False):
        super().__init__()
        self.fork_feat = fork_feat
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        stages = [nn.Sequential(*[PoolFormerBlock(WIDTH) for _ in range(2)]), nn.Conv2d(WIDTH, 2 * WIDTH, 2, 2)]
        stages.append(nn.Sequential(*[PoolFormerBlock(2 * WIDTH, drop_path=0.1) for _ in range(2)]))
        self.network = nn.ModuleList(stages)
        self.norm = nn.GroupNorm(1, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward_tokens(self, x):
        outs = []
        for idx, block in enumerate(self.network):
            x = block(x)
            if self.fork_feat and idx in (0, 2):
                outs.append(x)
        if self.fork_feat:
            return outs
        return x

    def forward(self, x):
        x = self.patch_embed(x)
        x = self.forward_tokens(x)
        if self.fork_feat:
            return x
        x = self.norm(x)
        return self.head(x.mean([-2, -1]))


class AlphaZeroResBlock(nn.Module):
    def __init__(self, num_hidden):
        super().__init__()
        self.conv1 = nn.Conv2d(num_hidden, num_hidden, kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(num_hidden)
        self.conv2 = nn.Conv2d(num_hidden, num_hidden, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm2d(num_hidden)

    def forward(self, x):
        residual = x
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += residual
        x = F.relu(x)
        return x


class AlphaZero(nn.Module):
    def __init__(self, num_resBlocks=3, num_hidden=WIDTH):
        super().__init__()
        self.startBlock = nn.Sequential(nn.Conv2d(3, num_hidden, 3, padding=1), nn.BatchNorm2d(num_hidden), nn.ReLU())
        self.backBone = nn.ModuleList([AlphaZeroResBlock(num_hidden) for i in range(num_resBlocks)])
        self.policyHead = nn.Sequential(nn.Flatten(), nn.Linear(num_hidden * 64, 9))
        self.valueHead = nn.Sequential(nn.Flatten(), nn.Linear(num_hidden * 64, 1), nn.Tanh())

    def forward(self, x):
        x = self.startBlock(x)
        for resBlock in self.backBone:
            x = resBlock(x)
        policy = self.policyHead(x)
        value = self.valueHead(x)
        return policy, value


class CycleGANResnetBlock(nn.Module):
    def __init__(self, dim, padding_type="reflect", norm_layer=nn.InstanceNorm2d, use_dropout=True):
        super().__init__()
        conv_block = [nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3), norm_layer(dim), nn.ReLU(True)]
        conv_block += [nn.Dropout(0.5)] if use_dropout else []
        conv_block += [nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3), norm_layer(dim)]
        self.conv_block = nn.Sequential(*conv_block)

    def forward(self, x):
        out = x + self.conv_block(x)
        return out


class CycleGANGenerator(nn.Module):
    def __init__(self, n_blocks=3, ngf=WIDTH):
        super().__init__()
        model = [nn.ReflectionPad2d(1), nn.Conv2d(3, ngf, 3), nn.InstanceNorm2d(ngf), nn.ReLU(True)]
        model += [nn.Conv2d(ngf, 2 * ngf, 3, stride=2, padding=1), nn.InstanceNorm2d(2 * ngf), nn.ReLU(True)]
        for _ in range(n_blocks):
            model += [CycleGANResnetBlock(2 * ngf)]
        model += [nn.ConvTranspose2d(2 * ngf, 3, 3, stride=2, padding=1, output_padding=1), nn.Tanh()]
        self.model = nn.Sequential(*model)

    def forward(self, input):
        return self.model(input)


class YOLOBottleneck(nn.Module):
    def __init__(self, c1, c2, shortcut=True, e=0.5):
        super().__init__()
        c_ = int(c2 * e)
        self.cv1 = nn.Sequential(nn.Conv2d(c1, c_, 3, padding=1, bias=False), nn.BatchNorm2d(c_), nn.SiLU())
        self.cv2 = nn.Sequential(nn.Conv2d(c_, c2, 3, padding=1, bias=False), nn.BatchNorm2d(c2), nn.SiLU())
        self.add = shortcut and c1 == c2

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class YOLOC2f(nn.Module):
    def __init__(self, c1, c2, n=2, shortcut=True, e=0.5):
        super().__init__()
        self.c = int(c2 * e)
        self.cv1 = nn.Conv2d(c1, 2 * self.c, 1, 1)
        self.cv2 = nn.Conv2d((2 + n) * self.c, c2, 1)
        self.m = nn.ModuleList(YOLOBottleneck(self.c, self.c, shortcut, e=1.0) for _ in range(n))

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class YOLOC3(nn.Module):
    def __init__(self, c1, c2, n=2, shortcut=True, e=0.5):
        super().__init__()
        c_ = int(c2 * e)
        self.cv1, self.cv2, self.cv3 = nn.Conv2d(c1, c_, 1), nn.Conv2d(c1, c_, 1), nn.Conv2d(2 * c_, c2, 1)
        self.m = nn.Sequential(*(YOLOBottleneck(c_, c_, shortcut, e=1.0) for _ in range(n)))

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


def yolo():
    return nn.Sequential(nn.Conv2d(3, WIDTH, 3, 1, 1), YOLOC3(WIDTH, WIDTH), YOLOC2f(WIDTH, WIDTH, 2))


WILD = {
    "pytorch-cifar ResNet": lambda: (KuangliuResNet(KuangliuBasicBlock), (image(),)),
    "pytorch-cifar PreActResNet": lambda: (KuangliuResNet(KuangliuPreActBlock), (image(),)),
    "pytorch-cifar ResNeXt": lambda: (KuangliuResNet(KuangliuBottleneck), (image(),)),
    "pytorch-cifar SENet": lambda: (KuangliuResNet(SEPreActBlock), (image(),)),
    "torchvision BasicBlock": lambda: (TVResNet(TVBasicBlock), (image(),)),
    "torchvision Bottleneck": lambda: (TVResNet(TVBottleneck), (image(),)),
    "Wide-ResNet": lambda: (WideResNet(), (image(),)),
    "MobileNetV2": lambda: (MobileNetV2(), (image(),)),
    "EfficientNet": lambda: (EfficientNet(), (image(),)),
    "EDSR": lambda: (EDSR(), (image(),)),
    "RCAN": lambda: (RCAN(), (image(),)),
    "ESRGAN": lambda: (ESRGAN(), (image(),)),
    "SwinIR": lambda: (SwinIR(), (image(),)),
    "NAFNet": lambda: (NAFNet(), (image(),)),
    "ConvNeXt": lambda: (ConvNeXt(ConvNeXtBlock), (image(),)),
    "ConvNeXtV2": lambda: (ConvNeXt(ConvNeXtV2Block, drop_path_rate=0.2), (image(),)),
    "PoolFormer": lambda: (PoolFormer(), (image(),)),
    "AlphaZero": lambda: (AlphaZero(), (image(),)),
    "CycleGAN": lambda: (CycleGANGenerator(), (image(),)),
    "YOLO": lambda: (yolo(), (image(),)),
}
