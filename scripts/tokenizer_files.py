"""The tokenizer of a model folder, with the tokens that are not in tokenizer.json, combined as in transformers 5: the tokens of
added_tokens_decoder in tokenizer_config.json or, in older folders, of added_tokens.json and special_tokens_map.json. A token is
special if these files call it special, or give it a name (eos_token). Needs the package tokenizers."""
import collections, json, os, sys

from errors import Bad

try:
    from tokenizers import AddedToken, Tokenizer
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install tokenizers")

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

# tokenizer; config: the merged keys of the files; named: {"eos_token": text}; special: texts of special tokens; added: texts of all
# added tokens that are more than space; both lists have the longest text first; invented: texts that files name without an id
Files = collections.namedtuple("Files", "tokenizer config named special added invented")


def read_json(path):
    """The object in the file; {}: there is no such file, or no object in it."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as problem:
        raise Bad(f"{path}: {problem}; expected JSON")
    return found if isinstance(found, dict) else {}


def read_config(folder):
    """The keys of tokenizer_config.json. Without added_tokens_decoder, the keys of special_tokens_map.json replace them."""
    config = read_json(os.path.join(folder, "tokenizer_config.json"))
    if "added_tokens_decoder" not in config:
        config.update(read_json(os.path.join(folder, "special_tokens_map.json")))
    return config


def text_of(token):
    """The text of a token: in files, a token is a text, or an object with content and flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def name_tokens(config):
    """{"eos_token": text}: tokens that a template may use by name."""
    extra = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    return {key: text_of(value) for key, value in {**named, **(extra if isinstance(extra, dict) else {})}.items() if text_of(value)}


def read_extra(config):
    """Special tokens without a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    return [text_of(token) for token in extra if text_of(token)] if isinstance(extra, list) else []


def read_added(folder, config, special):
    """[(id, token)] of added_tokens_decoder; in folders without it, of added_tokens.json."""
    path, found = os.path.join(folder, "tokenizer_config.json"), config.get("added_tokens_decoder")
    if found is None:
        path = os.path.join(folder, "added_tokens.json")
        found = {id: {"content": text, "normalized": text not in special, "special": text in special}
                 for text, id in read_json(path).items()}
    try:
        return path, sorted((int(id), AddedToken(token["content"], **{key: token[key] for key in FLAGS if key in token}))
                            for id, token in found.items())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Bad(f"{path}: its added tokens are not as transformers writes them; expected "
                  '{"ID": {"content": TEXT, "special": true}} as added_tokens_decoder, or {TEXT: ID} in added_tokens.json')


def add_tokens(tokenizer, folder, config):
    """Adds the tokens that the files name to the tokenizer. Returns the texts to which no file gives an id."""
    special = list(dict.fromkeys([*name_tokens(config).values(), *read_extra(config)]))
    path, added = read_added(folder, config, special)
    flags = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    old = "added_tokens_decoder" not in config              # in this case tokenizer.json takes precedence
    tokenizer.add_tokens([token for _, token in added if (token.content not in flags if old else
                                                          flags.get(token.content) != repr(token))])
    for id, token in added:
        found = tokenizer.token_to_id(token.content)
        if found != id:
            raise Bad(f"{path}: {token.content} has the id {id}, but with tokenizer.json it gets {found}; expected the same: "
                      "save the tokenizer anew, with transformers' save_pretrained")
    invented = {text for text in special if tokenizer.token_to_id(text) is None}
    known = {token.content: token.__getstate__() for token in tokenizer.get_added_tokens_decoder().values()}
    for text in special:
        state = {"normalized": False, **known.get(text, {}), "special": True}
        tokenizer.add_special_tokens([AddedToken(text, **{key: state[key] for key in FLAGS if key in state})])
    return invented


def load(path):
    """Loads a tokenizer.json, or a folder with one. The tokenizer neither truncates nor pads."""
    folder = path if os.path.isdir(path) else None
    path = os.path.join(path, "tokenizer.json") if folder else path
    if not os.path.isfile(path):
        raise Bad(f"{path}: no such file; if there is only a tokenizer.model, transformers makes tokenizer.json: "
                  "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)")
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as problem:        # tokenizers raises only the class Exception
        raise Bad(f"{path}: {problem}; expected a tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_config(folder) if folder else {}
    invented = add_tokens(tokenizer, folder, config) if folder else set()
    if config.get("split_special_tokens"):              # then a special token spelled out in a text is ordinary text
        tokenizer.encode_special_tokens = True
    tokens = list(tokenizer.get_added_tokens_decoder().values())
    longest_first = lambda some: tuple(sorted({token.content for token in some}, key=lambda text: (-len(text), text)))
    return Files(tokenizer, config, name_tokens(config), longest_first(token for token in tokens if token.special),
                 longest_first(token for token in tokens if token.content.strip()), invented)
