"""A model folder's chat template, rendered as Hugging Face's apply_chat_template does. Needs the package jinja2."""
import datetime, json, os, sys

from shards import Bad

try:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install jinja2")


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which some templates have around answers, renders what is in it."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as problem:
        raise Bad(f"{path}: {problem}; expected JSON")
    return found if isinstance(found, dict) else {}


def find_template(folder, config):
    """(name of the file, text): chat_template.jinja, which goes before the chat_template of tokenizer_config.json."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                return path, file.read()
        except UnicodeDecodeError as problem:
            raise Bad(f"{path}: {problem}; expected a text in UTF-8")
    path, found = os.path.join(folder, "tokenizer_config.json"), config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    if not isinstance(found, str):
        raise Bad(f"{folder} has no chat template; expected chat_template.jinja, or a chat_template in tokenizer_config.json "
                  "(a text, or a list with one named default). A base model has none: write the one that it is to learn to "
                  f"{os.path.join(folder, 'chat_template.jinja')}, and name eos_token, which ends its answers, in {path}")
    return path, found


class ChatTemplate:
    """now: what strftime_now tells the template, so that all conversations have the same date; default: the time."""

    def __init__(self, folder, now=None):
        config = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            config.update(read_json(os.path.join(folder, name)))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = (now or datetime.datetime.now()).strftime
        self.tokens = {}        # bos_token, eos_token ...: text
        for key, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                self.tokens[key] = text
        path, text = find_template(folder, config)
        try:
            self.template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as problem:
            raise Bad(f"{path}: line {problem.lineno} of the chat template: {problem}; expected a template of jinja")

    def render(self, messages, add_generation_prompt=False, tools=None):
        """The text of messages [{"role", "content"}, ...]; raises whatever the template does."""
        return self.template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                                    **self.tokens)
