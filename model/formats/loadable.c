/* Refuses the folder of a model in an unsupported format; the message gives the command that
 * converts it. */
#include "model/formats/loadable.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/formats/adapter.h"
#include "model/formats/file.h"
#include "model/formats/pointer.h"

/* Whether the text is owner/name of letters, digits, dots, dashes and underscores. */
static bool may_be_hub_name(const char *path)
{
    int slashes = 0;
    for (const char *c = path; *c; c++) {
        slashes += *c == '/';
        if (!isalnum((unsigned char)*c) && !strchr("/._-", *c))
            return false;
    }
    return slashes == 1 && isalnum((unsigned char)path[0]) &&
           isalnum((unsigned char)strchr(path, '/')[1]);
}

static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Returns the folder of a file; the caller owns it. */
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return !slash          ? xstrdup(".")
           : slash == path ? xstrdup("/")
                           : xasprintf("%.*s", (int)(slash - path), path);
}

static _Noreturn void die_meta(const char *where, const char *folder)
{
    die("%s: these are weights in Meta's format. Convert them with transformers 4 and load the "
        "result:\n"
        "  python3 -m transformers.models.llama.convert_llama_weights_to_hf --input_dir %s "
        "--model_size 7B --llama_version 2 "
        "--output_dir OUTPUT",
        where, folder);
}

static _Noreturn void die_olmo(const char *where, const char *folder)
{
    die("%s: this is OLMo's own format. Convert it and load the result:\n"
        "  python3 scripts/convert_olmo.py %s OUTPUT",
        where, folder);
}

/* more: further arguments of from_pretrained. */
static _Noreturn void die_transformers(const char *where, const char *what, const char *folder,
                                       const char *more)
{
    die("%s: %s; only safetensors can be read. Save the model again with transformers and load the "
        "result:\n"
        "  python3 -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        "[X.from_pretrained('%s'%s).save_pretrained('OUTPUT') for X in (M, T)]\"",
        where, what, folder, more);
}

static _Noreturn void die_file(const char *where, const char *path, const char *key)
{
    char *folder = folder_of(path), *more = xasprintf(", gguf_file='%s'", name_of(path));
    if (text_ends_with(path, ".gguf"))
        die_transformers(where, "this is a GGUF file", folder, more);
    if (text_ends_with(path, ".bin"))
        die_transformers(where, "this is a PyTorch file", folder, "");
    if (text_ends_with(path, ".pth"))
        die_meta(where, folder);
    if (text_ends_with(path, ".pt"))
        die_olmo(where, folder);
    die("%s: this is a file; give the folder with all files of the model: --%s=%s", where, key,
        folder);
}

/* Dies if the folder has a known unsupported format. key: the key that names the folder. */
static void die_of_format(const char *where, const char *key, const char *folder)
{
    if (file_is_in(folder, "pytorch_model.bin") ||
        file_is_in(folder, "pytorch_model.bin.index.json"))
        die_transformers(where, "its weights are PyTorch files", folder, "");
    if (file_is_in(folder, "consolidated.00.pth"))
        die_meta(where, folder);
    if (file_is_in(folder, "model.pt"))
        die_olmo(where, folder);
    char *pointer = xasprintf("%s/latest", folder), *latest = pointer_follow(pointer);
    if (latest || file_is_in(folder, "latest/config.json") ||
        file_is_in(folder, "latest/adapter_config.json"))
        die("%s: this is the save_folder of a run; its newest checkpoint is --%s=%s/latest", where,
            key, folder);
    if (file_is_in(folder, "model_and_optim"))
        die("%s: this is a checkpoint of OLMo-core. Convert the checkpoint with OLMo-core's "
            "src/examples/huggingface/convert_checkpoint_to_hf.py, and "
            "load the result",
            where);
    free(pointer);
}

/* key: the key that names the folder. */
static void check_folder(const char *where, const char *key, const char *folder)
{
    struct stat status;
    if (stat(folder, &status) != 0 && may_be_hub_name(folder))
        die("%s: there is no such folder; if this is a name on the Hugging Face hub, download it "
            "and give the folder:\n"
            "  hf download %s --local-dir %s\n  --%s=%s",
            where, folder, name_of(folder), key, name_of(folder));
    if (stat(folder, &status) != 0)
        die("%s: %s; give the model's folder: --%s=FOLDER", where,
            errno == ENOENT ? "there is no such folder" : strerror(errno), key);
    if (!S_ISDIR(status.st_mode))
        die_file(where, folder, key);
}

static void check_whole_model(const char *where, const char *key, const char *load_path)
{
    const bool described =
        file_is_in(load_path, "config.json") || file_is_in(load_path, "trainer.json");
    const bool weights = file_is_in(load_path, "model.safetensors") ||
                         file_is_in(load_path, "model.safetensors.index.json");
    if (!described && file_is_in(load_path, "config.yaml") &&
        (weights || file_is_in(load_path, "model.pt")))
        die_olmo(where, load_path);
    if (!weights)
        die_of_format(where, key, load_path);
}

static void check_adapter(const char *where, const char *folder)
{
    if (file_is_in(folder, "adapter_model.safetensors"))
        return;
    if (file_is_in(folder, "adapter_model.bin"))
        die("%s: its adapters are a PyTorch file; only safetensors can be read. Save them again "
            "with PEFT and load the result:\n"
            "  python3 -c \"from peft import AutoPeftModelForCausalLM as M; "
            "M.from_pretrained('%s').save_pretrained('OUTPUT')\"",
            where, folder);
    die("%s: there is an adapter_config.json, but no adapter_model.safetensors; fetch or copy the "
        "folder again",
        where);
}

void loadable_check(const char *where, const char *load_path)
{
    char *setting = xasprintf("%s%sload_path %s", where ? where : "", where ? ": " : "", load_path);
    check_folder(setting, "load_path", load_path);
    if (adapter_is(load_path))
        check_adapter(setting, load_path);
    else
        check_whole_model(setting, "load_path", load_path);
    free(setting);
}

void loadable_check_base(const char *where, const char *base_path)
{
    check_folder(where, "lora.base_path", base_path);
    if (adapter_is(base_path))
        die("%s: that is a folder of adapters; their base must be a whole model: "
            "--lora.base_path=FOLDER",
            where);
    check_whole_model(where, "lora.base_path", base_path);
    if (!file_is_in(base_path, "config.json"))
        die("%s: there is no config.json; expected a checkpoint stepN or a folder written by "
            "save_pretrained: "
            "--lora.base_path=FOLDER",
            where);
}
