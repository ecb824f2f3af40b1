"""What the emulated device runs: the layers of real models, with sizes and times.

Sizes are those of the published architectures, parameter by parameter (float32). Times are a
roofline of one NVIDIA T4 (data sheet: 8.1 TFLOP/s in float32, 320 GB/s): a layer takes the longer
of its arithmetic and its memory traffic. Backward takes twice the forward pass, since it computes
a gradient for the input and one for the weights. Only the proportions matter: a run scales all
times so that computation and communication have the wanted ratio.

Sources:
    ResNet-50: He et al., CVPR 2016, table 1, with torchvision's stride in the 3x3 convolution.
    VGG-16: Simonyan and Zisserman, ICLR 2015, table 1, column D.
    DenseNet-121: Huang et al., CVPR 2017, table 1.
    BERT-large: Devlin et al., NAACL 2019, section 3 (24 layers, hidden 1024); sequences of 128.
    GPT-2 small: Radford et al., 2019, table 2 (12 layers, hidden 768); sequences of 1024.
    DLRM: the MLPs of the MLPerf reference (Naumov et al., arXiv 1906.00091), behind one dense
    embedding of 100 MB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hvd_order.planning.predict.simulate import StepWorkload

_FLOPS = 8.1e12
_BYTES_PER_S = 320e9
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Layer:
    """Parameters that are read together, and what their layer computes.

    Attributes:
        shapes: of each parameter.
        forward_s, backward_s: duration on the device, in seconds.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward_s: float
    backward_s: float

    @property
    def tensors(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size_bytes(self) -> int:
        return _ELEMENT_BYTES * sum(self.tensors)


@dataclass(frozen=True)
class Profile:
    """A chain of layers, in the order of the forward pass.

    Attributes:
        by_kernels: layers hand their parameters to kernels, which read them where Python does not
            see it.
    """

    name: str
    layers: tuple[Layer, ...]
    by_kernels: bool = False

    def workload(self) -> StepWorkload:
        """The chain of its layers, parameter by parameter, as the emulated device runs it."""
        return StepWorkload.chain(
            [layer.name for layer in self.layers],
            [layer.forward_s for layer in self.layers],
            [layer.backward_s for layer in self.layers],
            [[_ELEMENT_BYTES * size for size in layer.tensors] for layer in self.layers],
        )

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled_to(self, compute_s: float) -> Profile:
        """The same model on a device that takes ``compute_s`` for forward and backward."""
        factor = compute_s / self.compute_s
        return replace(
            self,
            layers=tuple(
                replace(
                    layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor
                )
                for layer in self.layers
            ),
        )

    def shrunk(self, parts: int) -> Profile:
        """The same layers with one in so many of their parameters each."""
        layers = [
            replace(layer, shapes=tuple(_shrunk(shape, parts) for shape in layer.shapes))
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))


def _shrunk(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    if shape[0] >= parts:
        return (shape[0] // parts, *shape[1:])
    return (*(1 for _ in shape[1:]), max(1, math.prod(shape) // parts))


def _layer(
    name: str, shapes: Sequence[tuple[int, ...]], flops: float, elements_moved: float
) -> Layer:
    moved_bytes = _ELEMENT_BYTES * (elements_moved + sum(map(math.prod, shapes)))
    forward_s = max(flops / _FLOPS, moved_bytes / _BYTES_PER_S)
    return Layer(name, tuple(shapes), forward_s, 2 * forward_s)


def _convolution(
    name: str, kernel: int, inputs: int, outputs: int, side: int, batch: int, norm: int | None
) -> Layer:
    """A convolution with its bias (norm None) or its batch norm over ``norm`` channels.

    Args:
        side: of the output.
    """
    pixels = batch * side * side
    weights = kernel * kernel * inputs * outputs
    after = [(outputs,)] if norm is None else [(norm,), (norm,)]
    # Output written, and read and written again by the activation; the norm reads it twice more.
    moved = pixels * (inputs + outputs * (3 if norm is None else 5))
    shapes = [(outputs, inputs, kernel, kernel), *after]
    return _layer(name, shapes, 2 * weights * pixels, moved)


def _linear(
    name: str, inputs: int, outputs: int, rows: int, extra: Sequence[tuple[int, ...]] = ()
) -> Layer:
    """A linear layer with bias; ``extra``: parameters read just before, a norm's."""
    flops = 2 * inputs * outputs * rows
    shapes = [*extra, (outputs, inputs), (outputs,)]
    return _layer(name, shapes, flops, rows * (inputs + 2 * outputs))


def _embedding(shapes: Sequence[tuple[int, ...]], elements_moved: float) -> Layer:
    """A layer that reads few of its rows."""
    return _layer("embedding", shapes, 0, elements_moved - sum(map(math.prod, shapes)))


def resnet50(batch: int = 32) -> Profile:
    layers = [_convolution("conv1", 7, 3, 64, 112, batch, 64)]
    inputs = 64
    for stage, (blocks, width, side) in enumerate(
        [(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)], start=1
    ):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            side_in = side * 2 if block == 0 and stage > 1 else side
            out = 4 * width
            layers += [
                _convolution(f"{name}.conv1", 1, inputs, width, side_in, batch, width),
                _convolution(f"{name}.conv2", 3, width, width, side, batch, width),
                _convolution(f"{name}.conv3", 1, width, out, side, batch, out),
            ]
            if block == 0:
                layers.append(_convolution(f"{name}.downsample", 1, inputs, out, side, batch, out))
            inputs = out
    return Profile("resnet50", (*layers, _linear("fc", 2048, 1000, batch)))


def vgg16(batch: int = 32) -> Profile:
    layers = []
    inputs = 3
    stages = [(2, 64, 224), (2, 128, 112), (3, 256, 56), (3, 512, 28), (3, 512, 14)]
    for stage, (convolutions, width, side) in enumerate(stages, start=1):
        for i in range(convolutions):
            layers.append(_convolution(f"conv{stage}_{i}", 3, inputs, width, side, batch, None))
            inputs = width
    for name, size_in, size_out in (
        ("fc1", 25088, 4096), ("fc2", 4096, 4096), ("fc3", 4096, 1000),
    ):  # fmt: skip
        layers.append(_linear(name, size_in, size_out, batch))
    return Profile("vgg16", tuple(layers))


def densenet121(batch: int = 32) -> Profile:
    growth = 32
    layers = [_convolution("conv0", 7, 3, 64, 112, batch, 64)]
    width = 64
    for block, (count, side) in enumerate([(6, 56), (12, 28), (24, 14), (16, 7)], start=1):
        for i in range(count):
            name = f"block{block}.{i}"
            # The norm comes before its convolution here, so it has the input's channels.
            layers.append(_convolution(f"{name}.conv1", 1, width, 4 * growth, side, batch, width))
            layers.append(
                _convolution(f"{name}.conv2", 3, 4 * growth, growth, side, batch, 4 * growth)
            )
            width += growth
        if block < 4:
            layers.append(
                _convolution(f"transition{block}", 1, width, width // 2, side, batch, width)
            )
            width //= 2
    return Profile("densenet121", (*layers, _linear("fc", width, 1000, batch, [(width,)] * 2)))


def _attention_flops(hidden: int, tokens: int, sequence: int) -> float:
    return 4 * tokens * sequence * hidden  # scores and weighted sum


def gpt2_small(batch: int = 8, sequence: int = 1024) -> Profile:
    hidden, vocabulary = 768, 50257
    rows = batch * sequence
    norm = [(hidden,), (hidden,)]
    layers = [_embedding([(vocabulary, hidden), (sequence, hidden)], 2 * rows * hidden)]
    for i in range(12):
        qkv = _linear(f"h{i}.attn.qkv", hidden, 3 * hidden, rows, norm)
        attention_s = _attention_flops(hidden, rows, sequence) / _FLOPS
        layers += [
            replace(
                qkv,
                forward_s=qkv.forward_s + attention_s,
                backward_s=qkv.backward_s + 2 * attention_s,
            ),
            _linear(f"h{i}.attn.proj", hidden, hidden, rows),
            _linear(f"h{i}.mlp.fc", hidden, 4 * hidden, rows, norm),
            _linear(f"h{i}.mlp.proj", 4 * hidden, hidden, rows),
        ]
    # The head multiplies by the embedding; its gradient is complete when the embedding's is.
    head_s = 2 * rows * hidden * vocabulary / _FLOPS
    layers.append(Layer("head", tuple(norm), head_s, 2 * head_s))
    return Profile("gpt2_small", tuple(layers))


def bert_large(batch: int = 32, sequence: int = 128) -> Profile:
    hidden, vocabulary = 1024, 30522
    rows = batch * sequence
    norm = [(hidden,), (hidden,)]
    embeddings = [(vocabulary, hidden), (512, hidden), (2, hidden)]
    layers = [_embedding([*embeddings, *norm], 4 * rows * hidden)]
    for i in range(24):
        attention_s = _attention_flops(hidden, rows, sequence) / _FLOPS
        value = _linear(f"layer{i}.value", hidden, hidden, rows)
        layers += [
            _linear(f"layer{i}.query", hidden, hidden, rows),
            _linear(f"layer{i}.key", hidden, hidden, rows),
            replace(
                value,
                forward_s=value.forward_s + attention_s,
                backward_s=value.backward_s + 2 * attention_s,
            ),
            _linear(f"layer{i}.attention.output", hidden, hidden, rows, norm),
            _linear(f"layer{i}.intermediate", hidden, 4 * hidden, rows),
            _linear(f"layer{i}.output", 4 * hidden, hidden, rows, norm),
        ]
    layers.append(_linear("pooler", hidden, hidden, batch))
    layers.append(_linear("transform", hidden, hidden, rows, norm))
    head_s = 2 * rows * 0.15 * hidden * vocabulary / _FLOPS  # 15 % of the tokens are masked
    layers.append(Layer("head", ((vocabulary,),), head_s, 2 * head_s))
    return Profile("bert_large", tuple(layers))


def dlrm(batch: int = 2048) -> Profile:
    layers = [_embedding([(195_312, 128)], 26 * batch * 128)]
    widths = [13, 512, 256, 128]
    layers += [_linear(f"bottom{i}", a, b, batch) for i, (a, b) in enumerate(pairwise(widths))]
    widths = [479, 1024, 1024, 512, 256, 1]
    layers += [_linear(f"top{i}", a, b, batch) for i, (a, b) in enumerate(pairwise(widths))]
    return Profile("dlrm", tuple(layers))


def parallel() -> Profile:
    """The negative control: one layer reads everything, so the order cannot matter.

    Source: "par-32" in the experiments of Hashemi et al., "Execution Ordering", SysML 2018.
    """
    return Profile("parallel", (Layer("all", ((2**10, 2**9),) * 32, 1.0, 2.0),))


def resnet50_by_kernels() -> Profile:
    """ResNet-50 of an extension: only C++ reads its parameters."""
    return replace(resnet50(), name="resnet50_by_kernels", by_kernels=True)


PROFILES: dict[str, Callable[[], Profile]] = {
    make.__name__: make
    for make in (
        resnet50,
        vgg16,
        densenet121,
        gpt2_small,
        bert_large,
        dlrm,
        parallel,
        resnet50_by_kernels,
    )
}
