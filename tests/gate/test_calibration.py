"""The packaged calibration: it holds for the weights that come with sdopt."""

from sdopt.gate.calibration import calibration_file, read_calibration
from sdopt.quality.features import feature_extractor
from sdopt.schema import Model
from sdopt.study.fingerprint import of_model


def test_the_packaged_calibration_is_of_the_packaged_weights() -> None:
    digests = read_calibration(calibration_file("emoji")).digests
    assert digests == {"model": of_model(Model()), "emojiclip": feature_extractor("emojiclip").digest}
