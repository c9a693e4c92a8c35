#!/usr/bin/env python3
"""Makes captioned pictures of Unicode's emoji: drawings with their names. Some drawings are for training, and other drawings of the
same names for tests.

    python3 scripts/make_emoji.py --names emoji-test.txt --train noto=NotoColorEmoji.ttf --train symbola=Symbola.ttf \\
        --test openmoji=glyf_colr0.ttf --copies 8 --output data/emoji

A source of drawings is NAME=FONT, or NAME=FOLDER with files such as 1F600.png or 1f1e8-1f1ed.png, named by code points. An emoji is
used if all sources of --test and at least one source of --train have it. Emoji with a skin tone are left out. OUTPUT gets pictures/
and conversations, which ask for the name and for Unicode's subgroup ("What is it?", "What kind is it?"): train.jsonl, and
test-name.jsonl and test-kind.jsonl with the other drawings. Each drawing to train on exists in --copies: the first is the drawing
itself; the others are moved, scaled and rotated at random, by --seed. The same command gives the same files. Needs pillow.
"""
import argparse, json, os, random, re, sys

import errors, pictures
from errors import Bad
from progress import Progress

try:
    from PIL import Image, ImageChops, ImageDraw, ImageEnhance, ImageFont, features
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install pillow")

FONT_SIZE = 109                     # the only size that bitmap fonts offer
NOT_SHOWN = (0xFE0F, 0x200D)        # code points that names of files often lack
QUESTIONS = {"name": "What is it?", "kind": "What kind is it?"}


def read_names(path):
    """[(code points, name, subgroup)] of the emoji that the file calls fully-qualified."""
    found, kind = [], ""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith("# subgroup:"):
                kind = line.split(":")[1].strip()
            one = re.match(r"([0-9A-F ]+); fully-qualified\s+# \S+ E[\d.]+ (.+)", line)
            if one and "skin tone" not in one[2]:
                found.append(([int(code, 16) for code in one[1].split()], one[2].strip(), kind))
    if not found:
        raise Bad(f"{path}: no line such as \"1F600 ; fully-qualified # ... E1.0 grinning face\"; expected Unicode's emoji-test.txt")
    return found


def key_of(codes):
    return tuple(code for code in codes if code not in NOT_SHOWN)


# ---- drawings ------------------------------------------------------------------------------------------------------------------

class Font:
    """Draws with a font. If an emoji consists of several glyphs, the font does not have this emoji."""

    def __init__(self, path):
        if not features.check("raqm"):
            raise Bad(f"{path}: this pillow joins no glyphs (it lacks raqm); expected the pillow of pip install pillow")
        self.font = ImageFont.truetype(path, FONT_SIZE)
        self.most = 1.3 * self.font.getlength("\U0001F600")
        self.missing = self.ink("\U0010FFFE")

    def ink(self, text):
        left, top, *_ = self.font.getbbox(text)
        canvas = Image.new("RGB", (2 * FONT_SIZE, 2 * FONT_SIZE), "white")
        ImageDraw.Draw(canvas).text((FONT_SIZE // 4 - left, FONT_SIZE // 4 - top), text, font=self.font, embedded_color=True,
                                    fill="black")
        return canvas

    def draw(self, codes):
        text = "".join(map(chr, codes))
        if self.font.getlength(text) > self.most:
            return None
        canvas = self.ink(text)
        return None if canvas.tobytes() == self.missing.tobytes() else canvas


class Folder:
    def __init__(self, path):
        self.files = {}
        for name in sorted(os.listdir(path)):
            if re.fullmatch(r"[0-9A-Fa-f]{2,6}(-[0-9A-Fa-f]{2,6})*\.png", name):
                self.files[key_of([int(code, 16) for code in name[:-4].split("-")])] = os.path.join(path, name)
        if not self.files:
            raise Bad(f"{path}: no file such as 1F600.png; expected pictures named by code points")

    def draw(self, codes):
        path = self.files.get(key_of(codes))
        if path is None:
            return None
        picture = pictures.load(path, "RGBA")
        canvas = Image.new("RGB", picture.size, "white")
        canvas.paste(picture, mask=picture.getchannel("A"))
        return canvas


def fitted(canvas, size):
    """The drawing, scaled to the whole of a white square; None: the drawing is empty."""
    box = canvas and ImageChops.difference(canvas, Image.new("RGB", canvas.size, "white")).getbbox()
    if not box:
        return None
    ink = canvas.crop(box)
    square = Image.new("RGB", (max(ink.size),) * 2, "white")
    square.paste(ink, ((square.width - ink.width) // 2, (square.height - ink.height) // 2))
    return square.resize((size, size), Image.Resampling.BICUBIC)


def moved(picture, draw):
    """The picture, rotated by up to 15 degrees, scaled by 0.7 to 1.1 in each direction, and moved by up to an eighth, with
    changed colours."""
    size = picture.width
    turned = picture.rotate(draw.uniform(-15, 15), Image.Resampling.BICUBIC, fillcolor="white")
    scale = [draw.uniform(0.7, 1.1) for _ in range(2)]
    shift = [size / 2 * (1 - 1 / s) - draw.uniform(-1, 1) * size / 8 / s for s in scale]
    placed = turned.transform((size, size), Image.Transform.AFFINE, (1 / scale[0], 0, shift[0], 0, 1 / scale[1], shift[1]),
                              Image.Resampling.BICUBIC, fillcolor="white")
    return ImageEnhance.Brightness(ImageEnhance.Color(placed).enhance(draw.uniform(0.2, 1.4))).enhance(draw.uniform(0.8, 1.1))


# ---- files -----------------------------------------------------------------------------------------------------------------------

def open_sources(given):
    found = {}
    for one in given:
        name, _, path = one.partition("=")
        if not name or not path or not re.fullmatch(r"[\w-]+", name) or name in found:
            raise Bad(f"{one}: expected NAME=FONT or NAME=FOLDER, each name once")
        found[name] = Folder(path) if os.path.isdir(path) else Font(path)
    return found


def conversation(path, question, answer):
    turns = [{"from": "human", "value": f"<image>\n{QUESTIONS[question]}"}, {"from": "gpt", "value": answer}]
    return json.dumps({"image": path, "conversations": turns}) + "\n"


def save(picture, args, source, codes, copy):
    name = "-".join(f"{code:x}" for code in codes) + (f"_{copy}" if copy else "") + ".png"
    picture.save(os.path.join(args.output, "pictures", source, name))
    return f"{source}/{name}"


def check(args):
    for name in ("size", "copies"):
        if getattr(args, name) < 1:
            raise Bad(f"--{name}={getattr(args, name)}; expected 1 or more")


def write(args, names, train, test):
    """Writes the pictures and conversations. Returns the number of emoji, and the number of pictures from each source."""
    counts, taken = dict.fromkeys([*train, *test], 0), 0
    files = {name: open(os.path.join(args.output, name + ".jsonl"), "w", encoding="utf-8")
             for name in ("train", "test-name", "test-kind")}
    with Progress(len(names)) as progress:
        for done, (codes, name, kind) in enumerate(names):
            drawn = {source: fitted(by.draw(codes), args.size) for source, by in {**train, **test}.items()}
            progress.show(done, f"{done:,} of {len(names):,} emoji")
            if not all(drawn[source] for source in test) or not any(drawn[source] for source in train):
                continue
            taken += 1
            for source in (source for source in drawn if drawn[source]):
                for copy in range(args.copies if source in train else 1):
                    change = random.Random(f"{args.seed} {source} {codes} {copy}")
                    path = save(moved(drawn[source], change) if copy else drawn[source], args, source, codes, copy)
                    counts[source] += 1
                    for question, answer in (("name", name), ("kind", kind)):
                        files["train" if source in train else "test-" + question].write(conversation(path, question, answer))
    for file in files.values():
        file.close()
    return taken, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", required=True, help="Unicode's emoji-test.txt")
    parser.add_argument("--train", action="append", required=True, metavar="NAME=SOURCE", help="drawings to train on")
    parser.add_argument("--test", action="append", required=True, metavar="NAME=SOURCE", help="drawings to test with")
    parser.add_argument("--size", type=int, default=64, help="width of a picture in pixels; default: 64")
    parser.add_argument("--copies", type=int, default=8, help="number of pictures of each drawing to train on; default: 8")
    parser.add_argument("--seed", type=int, default=0, help="seed of the copies; default: 0")
    parser.add_argument("--output", required=True, help="folder to make")
    args = parser.parse_args()
    check(args)
    sources = open_sources([*args.train, *args.test])
    if os.path.exists(args.output):
        raise Bad(f"{args.output} exists already; expected a new name")
    names = read_names(args.names)
    for source in sources:
        os.makedirs(os.path.join(args.output, "pictures", source))
    train = dict(list(sources.items())[:len(args.train)])
    test = {name: by for name, by in sources.items() if name not in train}
    taken, counts = write(args, names, train, test)
    if not taken:
        raise Bad(f"{args.output}: no emoji is drawn by all of --test and one of --train; expected fonts with emoji")
    print(f"{taken:,} emoji; " + ", ".join(f"{count:,} pictures of {source}" for source, count in counts.items()))


if __name__ == "__main__":
    try:
        errors.run(main, "fonts or folders with emoji, emoji-test.txt, and room for OUTPUT")
    except Bad as problem:
        sys.exit(f"error: {problem}")
