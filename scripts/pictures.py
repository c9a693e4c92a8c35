"""Reads pictures as load_image of transformers 5.24 does. Needs pillow."""
from errors import Bad

READING = 2         # increased when pictures are read in a new way; 1: pictures were not rotated by their EXIF orientation

deep = {}           # {path: None} of pictures with values above 255, which became 255: their pixels have more than 8 bits


def check_pillow():
    try:
        import PIL.Image        # noqa: load uses it
    except ImportError as problem:
        raise Bad(f"{problem}; expected pillow: pip install pillow")


def load(path, mode="RGB", turned=True):
    """The first frame in this mode, rotated by its EXIF orientation. RGB: transparent pixels keep their colours, and gray of 16
    or 32 bits is clipped at 255. turned=False: not rotated, as in READING 1."""
    from PIL import Image, ImageOps
    try:
        with Image.open(path) as picture:
            if picture.mode.startswith(("I", "F")):
                # the extrema of mode I;16B cannot be computed
                wide = picture if picture.mode == "F" else picture.convert("I")
                deep.update({path: None} if wide.getextrema()[1] > 255 else {})
            return (ImageOps.exif_transpose(picture) if turned else picture).convert(mode)
    except Exception as problem:        # OSError, but also DecompressionBombError, SyntaxError, ValueError, struct.error and others
        raise Bad(f"{path}: {getattr(problem, 'strerror', None) or problem}; expected a picture that Pillow reads: save it anew, "
                  "or leave it out")
