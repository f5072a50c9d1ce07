"""The zoo's CNN in float64: sums in another order give the same losses for thousands of steps."""

from torch import Tensor, float64, nn

from paceline.job.zoo.models import cifar_cnn


class Double(nn.Module):
    """A model whose weights are float64, as its inputs are then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.double()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(float64))  # type: ignore[no-any-return]


def build() -> nn.Module:
    """The CNN for 32 x 32 images of 10 classes."""
    return Double(cifar_cnn())
