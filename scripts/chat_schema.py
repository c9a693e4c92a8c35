"""The forms of a line in a file of conversations, and the JSON of a message that a chat template expects. Anything else is an
error that names its position; nothing is guessed. The template gets the same arguments as from apply_chat_template of
transformers."""
import collections, json

from errors import Bad

# messages: as the template gets them; roles: the role of each message: "system", "user", "assistant" or "tool"; learned: whether
# each message is an answer to be learned; tools: a list or None; variables: other variables of the template, by name; renamed:
# roles that the template does not know
Conversation = collections.namedtuple("Conversation", "messages roles learned tools variables renamed")

ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
         "chatgpt": "assistant", "model": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
         "tool_response": "tool", "function_response": "tool", "function_call": "assistant", "tool_call": "assistant"}
CALLS = ("function_call", "tool_call")          # roles of messages whose text is calls in JSON
OWN = ("developer", "tool", "function", "observation", "ipython")       # a template that names such a role gets the role unchanged
LEARNED = {"weight": (0, 1), "train": (False, True), "loss": (False, True)}     # keys of messages, and the meaning of their values
# names of the key with thoughts; transformers copies the thoughts to the first name
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
PARTS = ("text", "thinking")                    # types of parts whose text is under a key with the name of the type
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "self")     # "self": a name of jinja


def shown(value, most=60):
    """A value as shown in an error."""
    try:
        return json.dumps(value, ensure_ascii=False)[:most]
    except RecursionError:
        return "nested too deeply"


def no_constant(name):
    raise ValueError(f"{name} is not JSON")


def read_entry(line, where):
    """The JSON object of a line."""
    try:
        entry = json.loads(line, parse_constant=no_constant)
    except RecursionError:
        raise Bad(f"{where}: nested too deeply; expected a conversation in JSON")
    except ValueError as problem:
        if line.lstrip().startswith(b"["):
            raise Bad(f"{where}: a list over several lines; expected one object per line: jq -c '.[]' FILE > FILE.jsonl")
        raise Bad(f"{where}: {getattr(problem, 'msg', problem)}; expected a conversation in JSON")
    if not isinstance(entry, dict):
        raise Bad(f"{where}: {shown(entry)}; expected an object (to convert a list: jq -c '.[]' FILE > FILE.jsonl)")
    return entry


def decode(value, kind, where, what):
    """value as a list or dict (kind). value may also be JSON text of a list or dict; a blank text is an empty list."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value, parse_constant=no_constant) if value.strip() or kind is dict else []
        except (ValueError, RecursionError):
            pass
    if not isinstance(found, kind):
        raise Bad(f"{where}: {what} is {shown(value)}; expected {'a list' if kind is list else 'an object'}, or JSON text of one")
    return found


# ---- messages ----------------------------------------------------------------------------------------------------------------

def read_call(call, where):
    """Checks a call: {"function": {"name", "arguments"}} or {"name", "arguments"}; arguments: an object, or JSON text of one."""
    call = decode(call, dict, where, "a call of a tool")
    function = call if call.get("function") is None else call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Bad(f"{where}: a call of a tool is {shown(call)}; expected "
                  '{"function": {"name": TEXT, "arguments": {...}}}')
    if "arguments" in function:
        decode(function["arguments"], dict, where, '"arguments" of a call')
    return call


def read_calls(message, role, where):
    """The message with its calls, if it has any, in tool_calls. function_call is OpenAI's old name of a single call."""
    if message.get("function_call") is not None and not message.get("tool_calls"):
        message = {**message, "tool_calls": [{"type": "function", "function": message["function_call"]}]}
        message["tool_calls"][0]["function"] = decode(message.pop("function_call"), dict, where, '"function_call"')
    if "tool_calls" not in message:
        return message
    calls = [read_call(call, where) for call in decode(message["tool_calls"], list, where, '"tool_calls"')]
    if calls and ROLES[role] != "assistant":
        raise Bad(f"{where} has the role {shown(role)} and calls of tools; only the assistant may call tools")
    return {**message, "tool_calls": calls}


def read_content(message, role, where):
    """The content of a message: a text, or parts with text; from a tool also an object or list; none in a message with calls or
    thoughts."""
    content = message.get("content")
    if isinstance(content, list) and content and all(isinstance(part, dict) and part.get("type") in PARTS
                                                     and isinstance(part.get(part["type"]), str) for part in content):
        return
    if isinstance(content, (dict, list)) and ROLES[role] == "tool":
        return
    if content is None and (message.get("tool_calls") or any(name in message for name in THOUGHTS)):
        return
    if not isinstance(content, str):
        raise Bad(f"{where} has the content {shown(content)}; expected a text, or a list of parts "
                  '{"type": "text", "text": TEXT}')


def read_thoughts(message, where):
    found = {name: message[name] for name in THOUGHTS if name in message}
    for name, text in found.items():
        if not isinstance(text, str):
            raise Bad(f"{where}: \"{name}\" is {shown(text)}; expected a text")
    if len(set(found.values())) > 1:
        raise Bad(f"{where} has different thoughts in {' and in '.join(found)}; expected one of these keys, or the same "
                  "text in each")


def read_learned(message, role, where):
    """Whether the message is an answer to be learned, and the message without the keys that say so."""
    answer = learned = ROLES[role] == "assistant"
    for key, values in LEARNED.items():
        value = message.get(key)
        if answer and value is not None and value not in values:
            choice = " or ".join(map(json.dumps, values))
            raise Bad(f"{where} has the {key} {shown(value)}; expected {choice.replace(' or', ' (not learned) or')}")
        if not answer and key != "weight" and value is True:
            raise Bad(f"{where} has the role {shown(role)} and is to be learned (\"{key}\": true); only answers can be learned")
        learned = learned and (value is None or bool(value))
    return learned, {key: value for key, value in message.items() if key not in LEARNED}


def read_message(message, number, where, words):
    """(message as transformers passes it to templates, without keys whose value is null; role; learned)"""
    if not isinstance(message, dict):
        raise Bad(f"{where}: message {number} is {shown(message)}; expected an object")
    where = f"{where}: message {number}"
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise Bad(f"{where} has the role {shown(role)}; expected system, user, assistant or tool "
                  "(ShareGPT: \"from\" with human, gpt, function_call or observation)")
    if "value" in message and message.setdefault("content", message["value"]) != message["value"]:
        raise Bad(f"{where} has one text in \"content\" and another in \"value\"; expected one of these keys")
    message = {key: value for key, value in message.items() if key not in ("from", "value")}
    if role in CALLS:
        calls = decode(message.get("content"), (dict, list), where, "its text")
        message = {**message, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
        message["tool_calls"] = [{"type": "function", "function": call} for call in message["tool_calls"]]
    learned, message = read_learned(read_calls(message, role, where), role, where)
    read_thoughts(message, where)
    read_content(message, role, where)
    template_role = role if role in OWN and role in words else ROLES[role]
    return {**message, "role": template_role}, role, learned


# ---- forms of lines ----------------------------------------------------------------------------------------------------------

def read_texts(entry, keys, where):
    for key in keys:
        if not isinstance(entry.get(key), str):
            raise Bad(f"{where}: \"{key}\" is {shown(entry.get(key))}; expected a text")
    return [entry[key] for key in keys]


def say(role, text):
    return {"role": role, "content": text}


def read_list(entry, key, where):
    if not isinstance(entry[key], list) or not entry[key]:
        raise Bad(f"{where}: \"{key}\" is {shown(entry[key])}; expected a list of messages")
    return entry[key]


def read_completion(entry, where):
    """TRL's form: texts, or lists of messages. Only the answers in the completion are learned."""
    both = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        if isinstance(entry.get(key), list):
            answer = lambda one: isinstance(one, dict) and ROLES.get(str(one.get("role", one.get("from")))) == "assistant"
            both.append([{**one, "weight": 0} if key == "prompt" and answer(one) else one for one in read_list(entry, key, where)])
        else:
            both.append([say(role, *read_texts(entry, (key,), where))])
    return both[0] + both[1]


def read_alpaca(entry, where):
    """history has pairs of question and answer, which come first and are learned, too."""
    question, answer = read_texts(entry, ("instruction", "output"), where)
    question += "\n\n" + read_texts(entry, ("input",), where)[0] if entry.get("input") else ""
    history = entry.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2
                                                and all(isinstance(text, str) for text in pair) for pair in history):
        raise Bad(f"{where}: \"history\" is {shown(history)}; expected a list of pairs [question, answer]")
    return [say(role, text) for pair in [*history, [question, answer]] for role, text in zip(("user", "assistant"), pair)]


FORMS = (       # key that identifies the form, function that makes messages of it
    ("messages", lambda entry, where: read_list(entry, "messages", where)),
    ("conversations", lambda entry, where: read_list(entry, "conversations", where)),
    ("completion", read_completion),
    ("output", read_alpaca),
)


def read_tools(entry, where):
    """The tools: a list of objects, or None. OpenAI's old name of the key is functions."""
    if entry.get("tools") is None and entry.get("functions") is not None:
        functions = decode(entry["functions"], list, where, '"functions"')
        return [{"type": "function", "function": decode(one, dict, where, 'one of "functions"')} for one in functions]
    if entry.get("tools") is None:
        return None
    return [decode(tool, dict, where, 'one of "tools"') for tool in decode(entry["tools"], list, where, '"tools"')]


def read_variables(entry, where):
    """Variables of the template: TRL's chat_template_kwargs, and documents."""
    variables = entry.get("chat_template_kwargs") or {}
    variables = decode(variables, dict, where, '"chat_template_kwargs"')
    for name in RESERVED:
        if name in variables:
            raise Bad(f"{where}: \"chat_template_kwargs\" has {name}; expected other variables of the chat template")
    documents = entry.get("documents")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(one, dict) for one in documents)):
        raise Bad(f"{where}: \"documents\" is {shown(documents)}; expected a list of objects")
    return {**variables, "documents": documents}


def add_system(messages, entry, where):
    """Puts the text "system", which stands next to the messages, before the first message."""
    if entry.get("system"):
        system, = read_texts(entry, ("system",), where)
        first = messages[0] if isinstance(messages[0], dict) else {}
        if first.get("role", first.get("from")) not in ("system", "developer"):
            return [say("system", system), *messages]
        if first.get("content", first.get("value")) != system:
            raise Bad(f"{where}: two system messages, one in \"system\" and another as the first message; expected one of them")
    return messages


def read_conversation(line, where, words=frozenset()):
    """The Conversation of a line. words: the words of the chat template, among them the roles that it knows."""
    entry = read_entry(line, where)
    forms = [(key, make) for key, make in FORMS if key in entry]
    make = next((make for key, make in forms if entry[key] is not None), forms[0][1] if forms else None)
    if make is None:
        raise Bad(f"{where}: an object with {', '.join(entry)[:200] or 'nothing'}; expected messages, conversations, "
                  "prompt and completion, or instruction and output")
    given = make(entry, where)
    all = add_system(given, entry, where)
    read = [read_message(message, number, where, words) for number, message in enumerate(all, 1 + len(given) - len(all))]
    messages, roles, learned = map(list, zip(*read))
    renamed = [role for role, message in zip(roles, messages) if role in OWN and message["role"] != role]
    return Conversation(messages, [ROLES[role] for role in roles], learned, read_tools(entry, where), read_variables(entry, where),
                        renamed)
