"""Images in conversations, for make_chat_shards.py: which pictures the messages show, and at which positions. In the texts of
messages, an image is the text of the model's image token, even if the conversation has parts. In the output of the chat
template, it becomes as many tokens as the image has rows of features."""
import json, os

import chat_schema, chat_written, image_settings
from errors import Bad, shortened

PARTS = ("image", "image_url")
URLS = ("data:", "http://", "https://")
LONGEST_NAME = 4096         # no file system has longer names


def image_token(model, tokenizer):
    """The text of the image token of the model in this folder."""
    config = image_settings.read(model)["config"]
    number = config.get("image_token_index", config.get("image_token_id"))
    if not isinstance(number, int):
        raise Bad(f"{model}/config.json has no image_token_index: it is not a model with images; expected a LLaVA folder")
    token = tokenizer.id_to_token(number)
    if not token:
        raise Bad(f"{model}: config.json has the image_token_index {number}, which is not a token of its tokenizer; expected a "
                  "token: add <image> to the tokenizer")
    return token


class Features:
    """The features in `folder` for the model in `model`, whose tokenizer has the image token."""

    def __init__(self, folder, model, tokenizer):
        self.folder, path = folder, os.path.join(folder, "features.json")
        found = image_settings.read_json(path)
        try:
            self.id, self.rows, self.names = int(found["id"], 16), found["rows"], found["names"]
        except (KeyError, TypeError, ValueError):
            raise Bad(f"{path}: expected the file that scripts/make_image_features.py wrote")
        wrong = image_settings.differing(found.get("settings", {}), model)
        if wrong:
            raise Bad(f"{path}: {wrong}: these are features for another model than {model}; make the features again with that folder")
        self.token = image_token(model, tokenizer)
        self.token_id = tokenizer.token_to_id(self.token)

    def number(self, name, where):
        if name not in self.names:
            raise Bad(f"{where}: the picture {shortened(name, 200)!r} is not in {self.folder}; expected one of the "
                      f"{len(self.names)} pictures there: make the features of these files, too")
        return self.names[name]


def name_of(value, where):
    """The name of a picture, given as a text or as an object with a text."""
    for key in ("image_url", "image", "path", "url"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    if not isinstance(value, str) or not value:
        raise Bad(f"{where}: a picture is {chat_schema.shown(value)}; expected the name of a file")
    if value.startswith(URLS) or len(value) > LONGEST_NAME or "\0" in value:
        raise Bad(f"{where}: a picture is {chat_schema.shown(value)} ({len(value):,} characters); expected the name of a file: "
                  "write the picture to a file and give its name")
    return value


def listed(entry, where):
    """The pictures listed next to the messages."""
    found = [value for key in ("image", "images") if (value := entry.pop(key, None)) is not None]
    return [name_of(one, where) for value in found for one in (value if isinstance(value, list) else [value])]


def flatten(message, token, where):
    """(the message with a text instead of parts, names of the pictures in its parts). A part without a name gives None as name."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(isinstance(part, dict) and part.get("type") in PARTS for part in content):
        return message, []
    text, names = "", []
    for part in content:
        if isinstance(part, dict) and part.get("type") in PARTS:
            named = {key: value for key, value in part.items() if key != "type" and value}
            names.append(name_of(named, where) if named else None)
            text += token + "\n"
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        else:
            raise Bad(f"{where}: a part is {chat_schema.shown(part)}; expected a text or an image")
    return {**message, "content": text}, names


def take(line, where, token):
    """(the line without pictures, names of its pictures in order)"""
    entry = chat_schema.read_entry(line, where)
    outside, inside = listed(entry, where), []
    for key, value in entry.items():
        if key in ("messages", "conversations", "prompt", "completion") and isinstance(value, list):
            both = [flatten(message, token, where) for message in value]
            entry[key] = [message for message, _ in both]
            inside += [name for _, names in both for name in names]
    named = [name for name in inside if name is not None]
    if named and (outside or len(named) < len(inside)):
        raise Bad(f"{where}: some pictures have their names in the messages and some next to them; "
                        "expected all names in the messages, or all next to them")
    return json.dumps(entry).encode(), named or outside


def check(talk, names, token, where):
    """Checks that questions have as many image tokens as pictures, and that answers have no image token."""
    texts = [message.get("content") or "" for message in talk.messages]
    counts = [text.count(token) if isinstance(text, str) else 0 for text in texts]
    for i, (role, count) in enumerate(zip(talk.roles, counts), 1):
        if count and role == "assistant":
            raise Bad(f"{where}: message {i}, an answer, has {token}; expected pictures in questions only")
    if sum(counts) != len(names):
        raise Bad(f"{where}: {sum(counts)} times {token} in the messages, and {len(names)} pictures; expected one for "
                  "each picture")


def expand(document, features, names, last, where):
    """(text with a token for each row, positions of its answers, numbers of its pictures) of a document. The document begins
    with the first message; last: it contains all messages."""
    token, text = features.token, document.text
    count = text.count(token)
    if count > len(names) or (last and count < len(names)):
        raise Bad(f"{where}: the chat template writes {count} of {len(names)} images; expected all: change the template")
    more = lambda place: place + text.count(token, 0, place) * (features.rows - 1) * len(token)
    answers = [(more(begin), more(end)) for begin, end in document.answers]
    return text.replace(token, token * features.rows), answers, [features.number(name, where) for name in names[:count]]


def as_parts(messages, token):
    """Messages with parts instead of texts, for templates that read only parts. These templates write a line end after an image."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts = content.split(token)
            parts = [part for i, text in enumerate(texts) for part in
                     ([{"type": "image"}] * (i > 0) + [{"type": "text", "text": text.strip("\n") if len(texts) > 1 else text}])]
            content = [part for part in parts if part["type"] == "image" or part["text"]]
        yield {**message, "content": content}


def suit(template, token):
    """Gives the template parts if it does not write a content that is a text. The template of LLaVA-1.5 writes only parts."""
    try:
        takes_texts = chat_written.MARK in template.render([{"role": "user", "content": chat_written.MARK}])
    except Exception:       # a template can raise any exception
        takes_texts = False
    if not takes_texts:
        template.change = lambda messages: as_parts(messages, token)
