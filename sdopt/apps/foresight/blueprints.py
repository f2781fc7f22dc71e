"""What a pipeline consists of and costs, and what it takes: of a UNet or of a transformer."""

from sdopt.apps.foresight.memory import Blueprint
from sdopt.apps.foresight.published import PublishedWork
from sdopt.apps.foresight.software import Software
from sdopt.apps.foresight.unet_blueprint import likely_of_unet, of_unet
from sdopt.pipelines.loading import family_of
from sdopt.schema import Shape
from sdopt.variant import Variant


def blueprint(variant: Variant, shape: Shape) -> Blueprint:
    """Builds the networks of a variant on the meta device, applies its options, and traces one step and one decoding.

    Raises:
        UsageError: the model's configuration is not on this machine.
    """
    if family_of(variant.model).is_unet:
        return of_unet(variant, shape)
    from sdopt.apps.foresight.transformer_blueprint import of_transformer

    return of_transformer(variant, shape)


def likely_of(
    work: PublishedWork, software: Software, kind: str, card_gib: float
) -> tuple[float, float]:
    """Returns floor and likely GiB of a published figure: `allocated`, `reserved` where there is room, or `device`."""
    if not software.is_transformer:
        return likely_of_unet(work, software, kind, card_gib)
    from sdopt.apps.foresight.transformer_blueprint import likely_of_transformer

    return likely_of_transformer(work, software, kind, card_gib)
