"""Renders a model folder's chat templates as apply_chat_template of transformers 5.24 does. Needs the packages jinja2 and
tokenizers."""
import datetime, glob, json, os, sys

import tokenizer_files
from chat_schema import THOUGHTS
from errors import Bad

try:
    import jinja2
    import jinja2.ext
    import jinja2.meta
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install jinja2")


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which some templates put around answers. The content is rendered as a separate
    block: variables that are set in the block are unknown after it."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(line)

    def render(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON without jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def read_text(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as problem:
        raise Bad(f"{path}: {problem}; expected a text in UTF-8")


def find_templates(folder, config):
    """{name: (file, text)} of all templates. They come from the first of these three sources that has any:
    1. the file chat_template.jinja, which is the template named default, and the files additional_chat_templates/NAME.jinja;
    2. chat_template in tokenizer_config.json: a list of named templates, or one text, which is the template named default;
    3. chat_template in chat_template.json, which old image processors write, in the same two forms."""
    path, found = os.path.join(folder, "chat_template.jinja"), {}
    if os.path.isfile(path):
        found["default"] = path, read_text(path)
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "additional_chat_templates", "*.jinja"))):
        found[os.path.basename(path)[:-len(".jinja")]] = path, read_text(path)
    if found:
        return found
    path, given = os.path.join(folder, "tokenizer_config.json"), config.get("chat_template")
    if given is None:
        path = os.path.join(folder, "chat_template.json")
        given = tokenizer_files.read_json(path).get("chat_template")
    if isinstance(given, str):
        return {"default": (path, given)}
    if isinstance(given, list):
        found = {one.get("name"): (path, one.get("template")) for one in given if isinstance(one, dict)}
    if not found or not all(isinstance(part, str) for name, (_, text) in found.items() for part in (name, text)):
        raise Bad(f"{folder} has no chat template; expected chat_template.jinja, or a chat_template in tokenizer_config.json "
                  "or chat_template.json (a text, or a list with one named default). A base model has no chat template: write the "
                  f"template that the model should learn to {os.path.join(folder, 'chat_template.jinja')}, and set eos_token to the "
                  f"token that ends an answer in {os.path.join(folder, 'tokenizer_config.json')}")
    return found


def find_names(tree):
    """(attributes and keys that a template reads, all other words in it, such as roles)."""
    words = lambda some: {node.value for node in some if isinstance(node, nodes.Const) and isinstance(node.value, str)}
    keys = {id(node.arg): node.arg for node in tree.find_all(nodes.Getitem)}
    other = words(node for node in tree.find_all(nodes.Const) if id(node) not in keys)
    return {node.attr for node in tree.find_all(nodes.Getattr)} | words(keys.values()) | other, other


def name_thoughts(messages):
    """Each message, with its thoughts under all names that templates read."""
    for message in messages:
        thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
        yield message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


class ChatTemplate:
    """files: tokenizer_files.load of the folder. now: the time that strftime_now gives the template, so that all conversations
    have the same date; default: the current time. names: all words of the folder's templates; words: the words that are not keys;
    variables: the variables that the templates read. change: None, or a function that converts messages for the templates."""

    def __init__(self, folder, files, now=None):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = (now or datetime.datetime.now()).strftime
        self.folder, self.tokens, self.templates, self.change = folder, files.named, {}, None
        self.names, self.words, self.variables = set(), set(), set()
        for name, (path, text) in find_templates(folder, files.config).items():
            try:
                self.templates[name] = environment.from_string(text)
                tree = environment.parse(text)
                names, words = find_names(tree)
                self.names, self.words = self.names | names, self.words | words
                self.variables |= jinja2.meta.find_undeclared_variables(tree)
            except jinja2.TemplateSyntaxError as problem:
                raise Bad(f"{path}: line {problem.lineno} of the chat template: {problem}; expected a template of jinja")

    def choose(self, tools):
        """The template named tool_use if there are tools, even an empty list; otherwise the default template."""
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise Bad(f"{self.folder} has chat templates named {', '.join(sorted(self.templates))}; expected one named default")
        return self.templates[name]

    def render(self, messages, add_generation_prompt=False, tools=None, **variables):
        """The text of messages [{"role", "content"}, ...]. Any exception of the template passes through."""
        messages = name_thoughts(messages)
        messages = list(self.change(messages) if self.change else messages)
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self.choose(tools).render(**{**self.tokens, "documents": None, **variables, **given})
