"""Images changed at random: by which draws, to which pixels, and for whom alike."""

import io

import matplotlib.cbook
import numpy as np
import pytest
from parquet_cases import encoded, random_images, write_images
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from scalejax.config.data import FashionMnistConfig, ParquetConfig, SyntheticImagesConfig
from scalejax.config.input import AugmentationConfig, RandAugmentConfig
from scalejax.config.parallelism import Layout
from scalejax.config.run import RunConfig
from scalejax.core.errors import ConfigError
from scalejax.core.serialization import build
from scalejax.data.datasets import open_source
from scalejax.data.facts import resolve
from scalejax.data.loader.loader import training_batches
from scalejax.data.transforms.augmentation import Augmentation
from scalejax.data.transforms.images import Box, decoded
from scalejax.data.transforms.pixels import enlarged, flipped, recoloured, shifted
from scalejax.data.transforms.rand_augment import (
    OPERATIONS,
    RAND_AUGMENT,
    TRIVIAL_AUGMENT,
    augmented,
)
from scalejax.data.transforms.random import uniforms
from scalejax.training.mesh import build_mesh
from scalejax.training.step import batch_shapes

EMBEDDED = FashionMnistConfig(edition="embedded")
ALL = AugmentationConfig(
    crop_area=(0.3, 1.0),
    flip=True,
    brightness=0.4,
    contrast=0.4,
    rand_augment=RandAugmentConfig(operations=2, magnitude=9),
    erase_probability=0.5,
    mixup_alpha=0.3,
)
IN_COLOUR = AugmentationConfig(
    crop_area=(0.08, 1.0),
    flip=True,
    trivial_augment=True,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
)
IMAGE = AugmentationConfig(crop_area=(0.08, 1.0))


def boxes_of(config, width, height, count=20_000):
    """Boxes of as many examples, [count, 4]."""
    changes = Augmentation(config=config, seed=3).of(np.arange(count), 0)
    return np.array([changes.crop(row, width, height) for row in range(count)])


def photograph(width, height, *, seed=0):
    """A smooth uint8 image [height, width, 3], which a JPEG keeps."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


# --- erasing, and the crop of evaluation ---


def erased_by_torchvision(numbers, height, width, area, aspect):
    """`RandomErasing.get_params` of torchvision 0.26, on numbers that are given: top, left, height
    and width; None where nothing is erased."""
    areas, aspects, (down, across) = numbers[:10], numbers[10:20], numbers[20:]
    log_ratio = np.log(aspect)
    for of_area, of_aspect in zip(areas, aspects, strict=True):
        erase_area = height * width * (area[0] + (area[1] - area[0]) * of_area)
        ratio = np.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * of_aspect)
        h = round(np.sqrt(erase_area * ratio))
        w = round(np.sqrt(erase_area / ratio))
        if not (h < height and w < width):
            continue
        return int(down * (height - h + 1)), int(across * (width - w + 1)), h, w
    return None


@pytest.mark.parametrize("area", [(0.02, 0.33), (0.5, 1.0)])
def test_what_is_erased_is_what_torchvision_erases(area):
    """The same rectangle for the same numbers, of uniform noise, in as many images as asked for;
    all else is as it was. Of large rectangles some find no place in ten tries."""
    config = AugmentationConfig(erase_probability=0.25, erase_area=area)
    images = np.full((2000, 10, 14, 3), 100, np.uint8)
    changes = Augmentation(config=config, seed=5).of(np.arange(2000), 3)
    found = changes.finished(images, np.arange(2000))

    numbers = uniforms(5, 3, np.arange(2000), 64)
    noise, erased, unplaced = [], 0, 0
    first = 32  # columns of crops, flips, colours and mixup come before
    for image, own in zip(found, numbers, strict=True):
        wanted = own[first] < 0.25
        box = erased_by_torchvision(own[first + 2 : first + 24], 10, 14, area, (0.3, 3.3))
        unplaced += wanted and box is None
        if not wanted or box is None:
            assert (image == 100).all()
            continue
        erased += 1
        top, left, high, wide = box
        inside = np.zeros((10, 14), bool)
        inside[top : top + high, left : left + wide] = True
        assert (image[~inside] == 100).all()
        noise.append(image[inside].ravel())
    assert abs(erased + unplaced - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75)  # 5 sigma
    assert (unplaced > 0) == (area == (0.5, 1.0))
    values = np.concatenate(noise)
    counts = np.bincount(values, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert np.abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(len(values))


@pytest.mark.parametrize(("width", "height"), [(320, 256), (256, 300)])
def test_evaluation_keeps_the_middle_as_torchvision_does(width, height):
    """A shorter side of 256 of which 224 are kept, 7/8, by Pillow as torchvision's Resize and
    CenterCrop have it: of an image of that size the very pixels. Training crops are as ever."""
    image = photograph(width, height)
    config = AugmentationConfig(evaluation_crop=0.875, flip=True)
    augmentation = Augmentation(config=config, seed=0)
    changes = augmentation.of(np.arange(1), None)

    found = decoded(encoded(image), 224, 3, lambda *size: changes.crop(0, *size))

    top, left = (height - 224) // 2, (width - 224) // 2
    assert np.array_equal(found, image[top : top + 224, left : left + 224])
    assert np.array_equal(changes.finished(found[None], np.arange(1))[0], found)
    random = Augmentation(config=AugmentationConfig(crop_area=(0.1, 0.4)), seed=0)
    both = AugmentationConfig(crop_area=(0.1, 0.4), evaluation_crop=0.875)
    assert random.of(np.arange(1), 0).crop(0, 99, 80) == Augmentation(config=both, seed=0).of(
        np.arange(1), 0
    ).crop(0, 99, 80)


def test_images_that_come_decoded_have_no_crop_of_evaluation():
    """They are of one size already."""
    tables = {
        "model": {"name": "mlp"},
        "data": {"name": "fashion_mnist", "edition": "embedded"},
        "batch": {"global_batch": 8},
        "optimizer": {"name": "sgd"},
        "schedule": {"base_learning_rate": 0.01},
        "input": {"augmentation": {"evaluation_crop": 0.9}},
    }
    with pytest.raises(ConfigError, match=r"evaluation_crop=0\.9 is refused: it must be 1"):
        build(RunConfig, tables)


# --- RandAugment and TrivialAugment ---


def portrait():
    """A photograph in colour, which comes with matplotlib, 75 x 65 of its pixels."""
    path = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    with Image.open(str(path)) as image:
        return np.asarray(image.convert("RGB").resize((150, 170)))[20:95, 40:105]


def operated_by_pillow(image, name, magnitude, is_negative, *, is_wide):
    """The paper's operation by Pillow's own functions, with the magnitudes of torchvision's
    `RandAugment` or `TrivialAugmentWide`. Shears go to the other side than torchvision's for the
    same sign, which is drawn: `Image.transform` takes where a pixel comes from."""
    picture = Image.fromarray(image.squeeze())
    width, height = picture.size
    largest = {
        **dict.fromkeys(("shear_x", "shear_y"), 0.99 if is_wide else 0.3),
        "translate_x": 32 if is_wide else 150 / 331 * width,
        "translate_y": 32 if is_wide else 150 / 331 * height,
        "rotate": 135 if is_wide else 30,
    }.get(name, 0.99 if is_wide else 0.9)
    signed = np.linspace(0, largest, 31)[magnitude] * (-1 if is_negative else 1)
    affine = Image.Transform.AFFINE
    match name:
        case "shear_x":
            picture = picture.transform(picture.size, affine, (1, -signed, 0, 0, 1, 0))
        case "shear_y":
            picture = picture.transform(picture.size, affine, (1, 0, 0, -signed, 1, 0))
        case "translate_x":
            picture = picture.transform(picture.size, affine, (1, 0, -int(signed), 0, 1, 0))
        case "translate_y":
            picture = picture.transform(picture.size, affine, (1, 0, 0, 0, 1, -int(signed)))
        case "rotate":
            picture = picture.rotate(signed)
        case "posterize":
            lost = (np.arange(31) / (30 / (6 if is_wide else 4))).round().astype(int)
            picture = ImageOps.posterize(picture, 8 - lost[magnitude].item())
        case "solarize":
            threshold = np.linspace(255, 0, 31)[magnitude]
            picture = picture.point(
                [i if i < threshold else 255 - i for i in range(256)] * len(picture.getbands())
            )
        case "autocontrast":
            picture = ImageOps.autocontrast(picture)
        case "equalize":
            picture = ImageOps.equalize(picture)
        case "brightness" | "color" | "contrast" | "sharpness":
            picture = getattr(ImageEnhance, name.capitalize())(picture).enhance(1 + signed)
    return np.asarray(picture).reshape(image.shape)


@pytest.mark.parametrize("is_wide", [False, True])
def test_operations_are_those_of_pillow_in_steps_of_torchvision(is_wide):
    """The same pixels of a photograph and of grey garments, to either side, at any strength."""
    grey = open_source(EMBEDDED, "train", seed=0).take(np.arange(1))["inputs"][0]
    ranges = TRIVIAL_AUGMENT if is_wide else RAND_AUGMENT
    cases = [
        (number, magnitude, is_negative)
        for number in range(len(OPERATIONS))
        for magnitude in (0, 9, 17, 30)
        for is_negative in (False, True)
    ]
    which, magnitudes, signs = (np.array(column)[:, None] for column in zip(*cases, strict=True))

    for image in (portrait(), grey):
        same = np.tile(image, (len(cases), 1, 1, 1))
        found = augmented(same, which, magnitudes, signs, ranges)

        for (number, magnitude, is_negative), ours in zip(cases, found, strict=True):
            name = OPERATIONS[number]
            theirs = operated_by_pillow(image, name, magnitude, is_negative, is_wide=is_wide)
            assert np.array_equal(ours, theirs), (name, magnitude, is_negative)
            is_changed = (ours != image).any()
            assert is_changed or magnitude == 0 or name in ("identity", "color", "autocontrast")


def test_operations_by_hand():
    """Four pixels: moved two to the right, inverted from 128 on, with the upper four bits."""
    image = np.array([10, 100, 200, 255], np.uint8).reshape(1, 1, 4, 1)

    def after(*names, magnitude):
        numbers = np.array([[OPERATIONS.index(name) for name in names]])
        full, right = np.full(numbers.shape, magnitude), np.zeros(numbers.shape, bool)
        return augmented(image, numbers, full, right, RAND_AUGMENT).ravel().tolist()

    assert after("identity", magnitude=30) == [10, 100, 200, 255]
    assert after("translate_x", magnitude=30) == [0, 10, 100, 200]  # 150 / 331 of 4 pixels: 1.8
    assert after("solarize", magnitude=15) == [10, 100, 55, 0]  # from 127.5 on
    assert after("posterize", magnitude=30) == [0, 96, 192, 240]
    assert after("solarize", "posterize", magnitude=15) == [8, 100, 52, 0]  # in this order


@pytest.mark.parametrize(
    "config",
    [
        AugmentationConfig(rand_augment=RandAugmentConfig(operations=3, magnitude=7)),
        AugmentationConfig(trivial_augment=True),
    ],
)
def test_operations_are_drawn_alike(config, monkeypatch):
    """Every operation, side and, of TrivialAugment, strength is as likely (chi-squared), and other
    draws are what they were without them."""
    import scalejax.data.transforms.augmentation as module

    drawn = []
    monkeypatch.setattr(module, "augmented", lambda images, *rest: drawn.append(rest) or images)
    for epoch in (0, 1):
        changes = Augmentation(config=config, seed=0).of(np.arange(6000), epoch)
        changes.finished(np.zeros((6000, 1, 1, 1), np.uint8), np.arange(6000))
    (operations, magnitudes, signs, ranges), (later, *_) = drawn

    assert operations.shape == (6000, 1 if config.trivial_augment else 3)
    for column in operations.T:
        assert stats.chisquare(np.bincount(column, minlength=14)).pvalue > 1e-3
    assert abs(signs.mean() - 0.5) < 5 * 0.5 / np.sqrt(signs.size)
    if config.trivial_augment:
        assert ranges is TRIVIAL_AUGMENT
        assert stats.chisquare(np.bincount(magnitudes.ravel(), minlength=31)).pvalue > 1e-3
    else:
        assert ranges is RAND_AUGMENT
        assert (magnitudes == 7).all()
    related = np.corrcoef(
        [*operations.T, *magnitudes.T[: 1 if config.trivial_augment else 0], *signs.T, later[:, 0]]
    )
    assert np.abs(related - np.eye(len(related))).max() < 5 / np.sqrt(6000)
    both = AugmentationConfig(crop_area=(0.08, 1.0), trivial_augment=True)
    assert (boxes_of(both, 30, 40, 50) == boxes_of(IMAGE, 30, 40, 50)).all()


# --- random numbers ---


def test_numbers_of_an_example_are_uniform_and_unrelated():
    """Between columns, neighbours, epochs and seeds: no correlation beyond chance (5 sigma)."""
    here = uniforms(0, 0, np.arange(40_000), 12)
    others = [uniforms(0, 1, np.arange(40_000), 1), uniforms(1, 0, np.arange(40_000), 1)]

    columns = np.column_stack([here, np.roll(here[:, :1], 1, axis=0), *others])
    related = np.corrcoef(columns.T) - np.eye(columns.shape[1])

    assert np.abs(related).max() < 5 / np.sqrt(40_000)
    assert all(stats.kstest(column, "uniform").pvalue > 1e-4 for column in columns.T)


def test_shares_follow_the_beta_distribution():
    """Kolmogorov's bound for one in a million, for small and large alpha.

    Within 0.001 to 0.999: float32 has no numbers between 1 and 1 - 6e-8, where 1.6 % of
    Beta(0.2, 0.2) lies.
    """
    places = np.linspace(0.001, 0.999, 999)
    for alpha in (0.2, 1.0, 3.0):
        config = AugmentationConfig(mixup_alpha=alpha)
        shares = Augmentation(config=config, seed=1).of(np.arange(20_000), 2).beside()["mix"]

        assert shares.dtype == np.float32
        found = np.searchsorted(np.sort(shares), places) / 20_000
        assert np.abs(found - stats.beta(alpha, alpha).cdf(places)).max() < 2.7 / np.sqrt(20_000)


def test_crops_have_the_areas_and_aspects_asked_for():
    """Uniform area, aspect uniform in its logarithm, anywhere within a large image."""
    config = AugmentationConfig(crop_area=(0.1, 0.4), crop_aspect=(0.5, 2.0))
    left, top, width, height = boxes_of(config, 2000, 1500).T

    areas = width * height / (2000 * 1500)
    assert stats.kstest(areas, stats.uniform(0.1, 0.3).cdf).pvalue > 1e-3
    aspects = np.log2(width / height)
    # Of wide crops some do not fit in, which few do not at 0.4 of the area: 5 sigma of 20,000.
    assert abs(aspects.mean()) < 5 * 0.577 / np.sqrt(20_000) + 0.002
    assert aspects.min() >= -1.01
    assert aspects.max() <= 1.01
    assert (left >= 0).all()
    assert (left + width <= 2000).all()
    assert (top + height <= 1500).all()
    places = left / np.maximum(2000 - width, 1)
    assert stats.kstest(places, "uniform").pvalue > 1e-3


def test_crops_reach_every_place_alike():
    """Of 2 x 2 in 4 x 4 pixels: nine places, the last row and column among them, chi-squared."""
    config = AugmentationConfig(crop_area=(0.25, 0.25), crop_aspect=(1.0, 1.0))

    left, top, width, height = boxes_of(config, 4, 4, count=5000).T

    assert {*width.tolist(), *height.tolist()} == {2}
    assert stats.chisquare(np.bincount(3 * top + left, minlength=9)).pvalue > 1e-3


def test_an_image_that_no_crop_fits_keeps_its_middle():
    """The largest part of an aspect asked for: 4/3 of 100 pixels, from 433 on."""
    changes = Augmentation(config=AugmentationConfig(crop_area=(1.0, 1.0)), seed=0)

    assert changes.of(np.arange(1), 0).crop(0, 1000, 100) == Box(433, 0, 133, 100)
    assert changes.of(np.arange(1), 0).crop(0, 100, 1000) == Box(0, 433, 100, 133)


def test_half_of_the_images_are_flipped():
    """Binomial, 5 sigma of 10,000; and the next epoch flips others."""
    source = open_source(EMBEDDED, "train", seed=0, augmentation=AugmentationConfig(flip=True))
    plain = source.take(np.arange(10_000))["inputs"]
    flips = []
    for epoch in (0, 1):
        images = source.take(np.arange(10_000), epoch)["inputs"]
        is_flipped = (images == plain[:, :, ::-1]).all(axis=(1, 2, 3))
        assert (is_flipped | (images == plain).all(axis=(1, 2, 3))).all()
        flips.append(is_flipped)

    assert np.mean(flips) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(20_000))
    assert np.mean(flips[0] == flips[1]) == pytest.approx(0.5, abs=0.03)


# --- for whom alike ---


def tables(layout, global_batch, microbatches=1, **augmentation):
    """A run of the small cnn on Fashion-MNIST, all of it augmented unless said otherwise."""
    changes = augmentation or {"crop_area": [0.3, 1.0], "flip": True, "mixup_alpha": 0.3}
    return {
        "model": {"name": "cnn", "channels": [8, 16]},
        "data": {"name": "fashion_mnist", "edition": "embedded"},
        "batch": {"global_batch": global_batch, "microbatches": microbatches},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "schedule": {"base_learning_rate": 0.1},
        "layout": layout,
        "input": {"augmentation": changes},
    }


def parquet_of(folder, count=40, config=None):
    """Photographs of different sizes in Parquet."""
    images = [photograph(30 + 5 * (i % 7), 60 - 4 * (i % 5), seed=i) for i in range(count)]
    write_images(folder / "a.parquet", images, np.arange(count) % 4, kind="JPEG")
    config = ParquetConfig(train=str(folder), test=str(folder), image_size=24)
    return open_source(config, "train", seed=5, augmentation=IN_COLOUR)


@pytest.mark.parametrize("kind", ["in memory", "in files", "random"])
def test_an_example_does_not_depend_on_what_is_taken_with_it(kind, tmp_path):
    """One by one, in any order and twice over: what (seed, epoch, index) says."""
    if kind == "in files":
        source = parquet_of(tmp_path)
    else:
        # of 32 pixels or less TrivialAugment moves some out of sight, in both epochs
        synthetic = SyntheticImagesConfig(image_size=40, classes=4, train_examples=40)
        config, changes = (EMBEDDED, ALL) if kind == "in memory" else (synthetic, IN_COLOUR)
        source = open_source(config, "train", seed=5, augmentation=changes)
    indices = np.random.default_rng(0).permutation(40)

    together = source.take(indices, 2)
    again = [source.take(indices[place : place + 1], 2) for place in range(40)]

    for name, values in together.items():
        np.testing.assert_array_equal(np.concatenate([rows[name] for rows in again]), values)
    assert (source.take(indices, 3)["inputs"] != together["inputs"]).any(axis=(1, 2, 3)).all()
    assert (source.take(indices)["inputs"] != together["inputs"]).any(axis=(1, 2, 3)).all()
    assert "mix" not in source.take(indices)


def test_batches_do_not_depend_on_devices_or_on_their_size():
    """Eight devices or one, batches of 8 or of 16: the same 32 rows."""
    found = []
    for layout, batch in ((Layout(), 8), (Layout(data=4), 8), (Layout(data=2, fsdp=2), 16)):
        run = resolve(build(RunConfig, tables({"data": layout.data, "fsdp": layout.fsdp}, batch)))
        source = open_source(EMBEDDED, "train", seed=0, augmentation=ALL)
        shapes = batch_shapes(run, build_mesh(layout))
        steps = 32 // batch
        batches = training_batches(source, shapes, seed=0, start_step=0, stop_step=steps)
        rows = [{name: np.asarray(values) for name, values in each.items()} for each in batches]
        found.append({name: np.concatenate([each[name] for each in rows]) for name in rows[0]})

    assert set(found[0]) == {"inputs", "targets", "mix"}
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_array_equal(other[name], values)


# --- pixels ---


def test_a_crop_in_memory_is_what_pillow_makes_of_it():
    """To one step of 255, as Pillow rounds between columns and rows, and we do not."""
    images = random_images(50, 28)
    boxes = boxes_of(IMAGE, 28, 28, 50)

    ours = enlarged(images, boxes)

    for image, (left, top, width, height), found in zip(images, boxes, ours, strict=True):
        part = (left, top, left + width, top + height)
        theirs = Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR, part)
        assert np.abs(found.astype(int) - np.asarray(theirs)).max() <= 1


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_part_of_a_reduced_jpeg_is_the_part_of_the_whole(orientation):
    """Decoded at a fraction, and turned as its EXIF says, it is the same part."""
    upright = Image.fromarray(photograph(800, 600))
    back = {1: 0, 3: 180, 6: 90, 8: 270}[orientation]
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    upright.rotate(back, expand=True).save(file, "JPEG", quality=95, exif=exif)

    seen = []

    def crop(width, height):
        seen.append((width, height))
        return Box(100, 300, 600, 240)

    ours = decoded(file.getvalue(), 32, 3, crop)

    theirs = upright.resize((32, 32), Image.Resampling.BILINEAR, (100, 300, 700, 540))
    assert seen == [(800, 600)]
    # a smooth image; what is left is the JPEG's own loss and where halves of pixels fall
    assert np.abs(ours.astype(int) - np.asarray(theirs)).mean() < 1.5


def test_a_jpeg_is_not_reduced_below_the_size_of_its_part(monkeypatch):
    """A quarter of 800 pixels still has 64 in a crop of 256; an eighth has not."""
    content = encoded(photograph(800, 800), "JPEG")
    sizes = []
    load = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, *args: sizes.append(self.size) or load(self, *args)
    )

    decoded(content, 64, 3, lambda width, height: Box(0, 0, 256, 300))
    decoded(content, 64, 3, lambda width, height: Box(0, 0, 255, 300))
    decoded(content, 64, 3, lambda width, height: Box(0, 0, 60, 60))

    assert sizes == [(200, 200), (400, 400), (800, 800)]


def test_images_are_moved_and_mirrored_by_pixels():
    """Two to the right and one up; black comes in."""
    image = np.arange(1, 17, dtype=np.uint8).reshape(1, 4, 4, 1)

    moved = shifted(image, np.array([2]), np.array([-1]))[0, :, :, 0]
    mirrored = flipped(np.concatenate([image, image]), np.array([True, False]))[..., 0]

    assert moved.tolist() == [[0, 0, 5, 6], [0, 0, 9, 10], [0, 0, 13, 14], [0, 0, 0, 0]]
    assert mirrored[0, 0].tolist() == [4, 3, 2, 1]
    assert mirrored[1, 0].tolist() == [1, 2, 3, 4]


def test_shifts_reach_every_place_alike():
    """From -2 to 2 pixels each way: 25 places, chi-squared."""
    config = AugmentationConfig(shift_pixels=2)
    changes = Augmentation(config=config, seed=0).of(np.arange(5000), 0)
    images = np.zeros((5000, 7, 7, 1), np.uint8)
    images[:, 3, 3] = 255

    moved = changes.applied({"inputs": images})["inputs"][..., 0]

    places = np.bincount(moved.reshape(5000, -1).argmax(axis=1), minlength=49).reshape(7, 7)
    assert places[1:6, 1:6].sum() == 5000
    assert stats.chisquare(places[1:6, 1:6].ravel()).pvalue > 1e-3


NONE = [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "factor", "pixels", "expected"),
    [
        (0, 1.5, [[100, 50, 200]], [[150, 75, 255]]),
        (0, 0.5, [[100, 50, 201]], [[50, 25, 100]]),  # 100.5, to the even
        # grey 0.2989 * 100 and 0.587 * 200: means 29.89 and 117.4, of both 73.645
        (1, 0.5, [[100, 0, 0], [0, 200, 0]], [[87, 37, 37], [37, 137, 37]]),
        (2, 0.0, [[100, 0, 0], [10, 10, 10]], [[30, 30, 30], [10, 10, 10]]),
        (3, 1 / 3, [[200, 20, 20]], [[20, 200, 20]]),  # red to green
        (3, -1 / 3, [[200, 20, 20]], [[20, 20, 200]]),
        (3, 0.5, [[200, 20, 20], [7, 7, 7]], [[20, 200, 200], [7, 7, 7]]),
    ],
)
def test_colours_change_as_defined(change, factor, pixels, expected):
    """Brightness, contrast, saturation and hue of a few pixels, by hand."""
    factors = np.array([NONE])
    factors[0, change] = factor
    images = np.array([[pixels]], np.uint8)

    assert recoloured(images, factors, np.array([[change]])).tolist() == [[expected]]


def test_turned_hues_are_those_of_the_standard_library():
    """`colorsys` of 200 random pixels, each turned by its own share."""
    import colorsys

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (200, 1, 1, 3), dtype=np.uint8)
    turns = generator.uniform(-0.5, 0.5, 200)
    factors = np.tile(NONE, (200, 1))
    factors[:, 3] = turns

    ours = recoloured(pixels, factors, np.full((200, 1), 3))[:, 0, 0]

    for pixel, turn, found in zip(pixels[:, 0, 0], turns, ours, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        theirs = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
        assert np.abs(found - theirs).max() <= 0.51  # rounded


def test_changes_of_colours_come_in_the_order_given():
    """Brightness clips: before contrast and after it are not the same."""
    image = np.array([[[[200], [100]]]], np.uint8)
    factors = np.array([[1.5, 0.5, 1, 0]])

    first = recoloured(image, factors, np.array([[0, 1]])).ravel().tolist()
    last = recoloured(image, factors, np.array([[1, 0]])).ravel().tolist()

    assert first == [229, 176]  # 255 and 150, then half way to 202.5: 228.75 and 176.25
    assert last == [255, 188]  # 175 and 125, then 262.5 and 187.5


def test_every_order_of_colours_is_as_likely():
    """24 orders, chi-squared."""
    orders = []
    changes = Augmentation(config=IN_COLOUR, seed=0).of(np.arange(6000), 0)
    import scalejax.data.transforms.augmentation as module

    original = module.recoloured
    module.recoloured = lambda images, factors, order: orders.append(order) or images
    try:
        changes.finished(np.zeros((6000, 1, 1, 3), np.uint8), np.arange(6000))
    finally:
        module.recoloured = original

    _, counts = np.unique(orders[0], axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


# --- at the door ---


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"crop_area": (1.0, 0.08)}, r"crop_area=\[1.0, 0.08\] is refused: the least and the"),
        ({"crop_area": (0.0, 1.0)}, r"crop_area=\[0.0, 1.0\] is refused"),
        ({"crop_aspect": (1.333, 0.75)}, r"crop_aspect=\[1.333, 0.75\] is refused"),
        ({"hue": 0.6}, "hue=0.6 is refused: it must be from 0 to 0.5"),
        ({"brightness": -0.1}, "brightness=-0.1 is refused: it must be at least 0"),
        ({"contrast": 1.5}, "contrast=1.5 is refused: it must be from 0 to 1.0"),
        ({"erase_probability": 1.5}, r"erase_probability=1\.5 is refused: it must be from 0 to 1"),
        ({"erase_area": (0.0, 0.3)}, r"erase_area=\[0\.0, 0\.3\] is refused"),
        ({"erase_aspect": (0.0, 3.3)}, r"erase_aspect=\[0\.0, 3\.3\] is refused"),
        ({"evaluation_crop": 0.0}, r"evaluation_crop=0\.0 is refused: it must be above 0"),
        (
            {"cutmix_alpha": 1.0, "mixup_alpha": 0.2},
            r"cutmix_alpha=1\.0 is refused: .*mixup_alpha mixes pairs already",
        ),
        ({"cutmix_probability": 1.1}, r"cutmix_probability=1\.1 is refused"),
        (
            {"rand_augment": RandAugmentConfig(), "trivial_augment": True},
            "trivial_augment=True is refused: .*rand_augment draws operations already",
        ),
        ({"mixup_alpha": float("nan")}, "mixup_alpha=nan is refused"),
        (
            {"shift_pixels": 4, "crop_area": (0.5, 1.0)},
            "shift_pixels=4 is refused: .*crop_area",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, refusal):
    """Field, value, what is accepted."""
    with pytest.raises(ConfigError, match=refusal):
        AugmentationConfig(**changes)


@pytest.mark.parametrize(
    ("model", "data", "changes", "refusal"),
    [
        (
            {"name": "gpt"},
            {"name": "python_docs"},
            {"mixup_alpha": 0.2},
            "input.augmentation is refused: it changes images, .*'python_docs' holds text",
        ),
        (
            {"name": "gpt"},
            {"name": "python_docs"},
            {"rand_augment": {}},
            "input.augmentation is refused: it changes images, .*'python_docs' holds text",
        ),
        (
            None,
            None,
            {"rand_augment": {"operations": 0}},
            r"rand_augment\.operations=0 is refused: it must be from 1 to 14",
        ),
        (
            None,
            None,
            {"rand_augment": {"magnitude": 31}},
            r"rand_augment\.magnitude=31 is refused: it must be from 0 to 30",
        ),
        (
            None,
            {"name": "synthetic_images", "image_size": 28, "channels": 2},
            {"trivial_augment": True},
            r"trivial_augment is refused: .* and these have 2 channels; leave it out",
        ),
        (None, None, {"hue": 0.1}, "hue=0.1 is refused: the images are grey"),
        (None, None, {"saturation": 0.1}, "saturation=0.1 is refused: the images are grey"),
        (None, None, {"shift_pixels": 28}, "shift_pixels=28 is refused: .* below the 28 pixels"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(model, data, changes, refusal):
    """No text is cropped, and nothing grey has a hue."""
    wanted = tables({"data": 1}, 8, **changes)
    wanted |= {"model": model or wanted["model"], "data": data or wanted["data"]}

    with pytest.raises(ConfigError, match=refusal):
        resolve(build(RunConfig, wanted))


def test_rows_of_numbers_are_not_augmented(tmp_path):
    """A table has no pixels, and its rows are not mixed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1.0, 2.0], "label": [0, 1]}), tmp_path / "a.parquet")
    wanted = tables({"data": 1}, 2, mixup_alpha=0.2)
    data = {"name": "parquet", "train": str(tmp_path), "test": str(tmp_path)}
    wanted |= {"model": {"name": "mlp"}, "data": {**data, "feature_columns": ["x"]}}

    with pytest.raises(ConfigError, match="'parquet' holds rows of numbers; leave it out"):
        resolve(build(RunConfig, wanted))
