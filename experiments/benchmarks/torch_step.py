"""PyTorch's train step of torchvision's ResNet with autocast and GradScaler."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmarks.contenders import NotMeasured
from experiments.resnet import RESNET50_STAGES

TORCH = "PyTorch autocast + GradScaler"


def make_torch_turn(
    *,
    device: str,
    dtype: str,
    batch_size: int,
    image_size: int,
    num_classes: int,
    steps: int,
    stage_sizes: Sequence[int] = RESNET50_STAGES,
    width: int = 64,
) -> Callable[[], None]:
    """Makes a function that takes steps of SGD with momentum, in channels-last layout.

    Args:
        device: `cpu` or `cuda`.
        dtype: of autocast, `float16` or `bfloat16`; the scaler is on for float16.
        batch_size: images a step.
        image_size: their height and width.
        num_classes: size of the output.
        steps: that a call takes.
        stage_sizes: blocks in each of the four stages.
        width: channels of the first stage; torchvision has 64 alone.

    Returns:
        The function; it waits for its last step.

    Raises:
        NotMeasured: where torch or torchvision is missing, or it has no such model.
    """
    try:
        import torch  # type: ignore[import-not-found]
        import torchvision  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotMeasured("torch and torchvision are not installed") from error
    if width != 64 or len(stage_sizes) != 4:
        raise NotMeasured("torchvision's ResNets have width 64 and four stages")

    model: Any = torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, list(stage_sizes), num_classes=num_classes
    ).to(device)
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(num_classes, (batch_size,), device=device)

    def turn() -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=getattr(torch, dtype)):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()

    return turn
