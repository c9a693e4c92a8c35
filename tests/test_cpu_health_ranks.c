/* The state of GPUs, from NVML to metrics.jsonl and the terminal. This file replaces the driver's
 * library (dlopen, dlsym) and the device. Each rank's GPU has different values. On 1, 2 and 4
 * ranks. */
#include "tests/test.h"
#include "tests/kit.h"

#include <dlfcn.h>
#include <jansson.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/nvml.h"
#include "model/run/gpu_health.h"
#include "tests/models.h"
#include "tests/ranks.h"

/* ---- the library ----------------------------------------------------------------------------- */

/* The thread that reads the state of the GPU reads these values while a test changes some of
 * them. */
static struct {
    bool missing, opened; /* no libnvidia-ml.so.1; nvml_open has succeeded */
    /* a function missing in this driver's library; NULL: none */
    const char *lacks;
    bool refuses; /* calls return NVML_ERROR_NOT_SUPPORTED */
    bool no_energy;
    _Atomic unsigned temperature, sm_clock, pending, failed;
    _Atomic unsigned long long reasons, corrected, uncorrected;
    double watts, start;
} fake;

static int status(void)
{
    return fake.refuses ? 3 : 0;
}

static int init(void)
{
    return 0;
}

static int find(const char *address, void **gpu)
{
    *gpu = &fake;
    return strcmp(address, "0000:3B:00.0") == 0 ? 0 : 6;
}

static int power(void *gpu, unsigned *milliwatts)
{
    assert_ptr_equal(gpu, &fake);
    *milliwatts = (unsigned)(1e3 * fake.watts);
    return status();
}

static int power_limit(void *gpu, unsigned *milliwatts)
{
    (void)gpu;
    *milliwatts = 700000;
    return status();
}

static int energy(void *gpu, unsigned long long *millijoules)
{
    (void)gpu;
    *millijoules =
        5000000 + (unsigned long long)(1e3 * fake.watts * (clock_seconds() - fake.start));
    return fake.no_energy ? 3 : status();
}

static int temperature(void *gpu, int sensor, unsigned *celsius)
{
    (void)gpu;
    *celsius = fake.temperature;
    return sensor == 0 ? status() : 2;
}

static int clock_info(void *gpu, int type, unsigned *mhz)
{
    (void)gpu;
    *mhz = type == 1 ? fake.sm_clock : 3201;
    return type == 1 || type == 2 ? status() : 2;
}

static int reasons(void *gpu, unsigned long long *bits)
{
    (void)gpu;
    *bits = fake.reasons;
    return status();
}

static int ecc_errors(void *gpu, int type, int counter, unsigned long long *errors)
{
    (void)gpu;
    *errors = type == 1 ? fake.uncorrected : fake.corrected;
    return counter == 0 ? status() : 2;
}

static int remapped_rows(void *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                         unsigned *failed)
{
    (void)gpu;
    *corrected = *uncorrected = 1;
    *pending = fake.pending;
    *failed = fake.failed;
    return status();
}

void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags)
{
    (void)flags;
    return !fake.missing && strcmp(name, "libnvidia-ml.so.1") == 0 ? &fake : NULL;
}

void *__wrap_dlsym(void *library, const char *name);
void *__wrap_dlsym(void *library, const char *name)
{
    static const struct {
        const char *name;
        void *call;
    } calls[] = {
        { "nvmlInit_v2", init },
        { "nvmlDeviceGetHandleByPciBusId_v2", find },
        { "nvmlDeviceGetPowerUsage", power },
        { "nvmlDeviceGetEnforcedPowerLimit", power_limit },
        { "nvmlDeviceGetTotalEnergyConsumption", energy },
        { "nvmlDeviceGetTemperature", temperature },
        { "nvmlDeviceGetClockInfo", clock_info },
        { "nvmlDeviceGetCurrentClocksThrottleReasons", reasons },
        { "nvmlDeviceGetTotalEccErrors", ecc_errors },
        { "nvmlDeviceGetRemappedRows", remapped_rows },
    };
    assert_ptr_equal(library, &fake);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        if (strcmp(calls[i].name, name) == 0 && !(fake.lacks && strcmp(fake.lacks, name) == 0))
            return calls[i].call;
    return NULL;
}

bool __wrap_device_health(DeviceHealth *h);
bool __wrap_device_health(DeviceHealth *h)
{
    if (fake.opened)
        nvml_read(h);
    return fake.opened;
}

/* Sets the values of a healthy GPU. */
static void fake_gpu(void)
{
    memset(&fake, 0, sizeof fake);
    fake.temperature = 50 + (unsigned)comm_rank();
    fake.sm_clock = 1900 - 100 * (unsigned)comm_rank();
    fake.watts = 100 * (comm_rank() + 1);
    fake.start = clock_seconds();
    fake.opened = nvml_open("0000:3B:00.0");
    assert_true(fake.opened);
}

/* ---- one GPU --------------------------------------------------------------------------------- */

TEST(test_library)
{
    fake_gpu();
    assert_false(nvml_open("0000:86:00.0"));
    fake.lacks = "nvmlInit_v2";
    assert_false(nvml_open("0000:3B:00.0"));
    fake.lacks = NULL;
    fake.missing = true;
    assert_false(nvml_open("0000:3B:00.0"));
}

TEST(test_reading)
{
    DeviceHealth d;
    fake_gpu();
    fake.corrected = 7;
    fake.reasons = 0x04;
    nvml_read(&d);
    assert_true(d.power == fake.watts && d.power_limit == 700 && d.temperature == fake.temperature);
    assert_true(d.sm_clock == fake.sm_clock && d.memory_clock == 3201 && d.power_capped == 1);
    assert_true(d.ecc_corrected == 7 && d.ecc_uncorrected == 0 && d.faults == 0);
    assert_true(d.energy >= 5000 && d.energy <= 5000 + fake.watts * (clock_seconds() - fake.start));
}

/* A value that the GPU refuses or the driver lacks is unknown, which is no fault. */
TEST(test_unknown)
{
    DeviceHealth d;
    fake_gpu();
    fake.reasons = 0xff;
    fake.pending = 1;
    fake.failed = 1;
    fake.uncorrected = 1;
    fake.refuses = true;
    nvml_read(&d);
    assert_true(isnan(d.power) && isnan(d.power_limit) && isnan(d.energy) && isnan(d.temperature) &&
                isnan(d.sm_clock));
    assert_true(isnan(d.memory_clock) && isnan(d.power_capped) && isnan(d.ecc_corrected) &&
                isnan(d.ecc_uncorrected));
    assert_int_equal(d.faults, 0);
    fake.refuses = false;
    fake.lacks = "nvmlDeviceGetTotalEnergyConsumption";
    assert_true(nvml_open("0000:3B:00.0"));
    nvml_read(&d);
    assert_true(isnan(d.energy) && d.power == fake.watts);
}

/* The power cap, idleness and clock settings are no faults. */
TEST(test_faults)
{
    static const struct {
        unsigned long long reasons;
        unsigned faults;
    } cases[] = {
        { 0x01 | 0x02 | 0x04 | 0x10 | 0x100, 0 }, { 0x20, 1u << FAULT_HOT },
        { 0x08 | 0x40, 1u << FAULT_TOO_HOT },     { 0x08 | 0x80, 1u << FAULT_POWER_BRAKE },
        { 0x08, 1u << FAULT_SLOWDOWN },           { 0x04 | 0x20, 1u << FAULT_HOT },
    };
    DeviceHealth d;
    fake_gpu();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fake.reasons = cases[i].reasons;
        nvml_read(&d);
        assert_int_equal(d.faults, cases[i].faults);
    }
    fake.reasons = 0;
    fake.uncorrected = 1;
    fake.pending = 1;
    fake.failed = 1;
    nvml_read(&d);
    assert_int_equal(d.faults,
                     1u << FAULT_ECC | 1u << FAULT_REMAP_PENDING | 1u << FAULT_REMAP_FAILED);
}

/* ---- a run of all ranks ---------------------------------------------------------------------- */

enum { TOKENS = 1000 };  /* tokens of a step */
static char heard[4096]; /* this rank's output on stderr */

static json_t *last_line(void)
{
    char path[64], text[4096];
    snprintf(path, sizeof path, "%s/metrics.jsonl", shared);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    json_t *o = NULL;
    while (fgets(text, sizeof text, f)) {
        json_decref(o);
        o = json_loads(text, 0, NULL);
        assert_non_null(o);
    }
    fclose(f);
    unlink(path);
    return o;
}

/* Runs steps of 20 ms, with a reading each ms. `change` is called after half of the steps. Returns
 * the last line of rank 0. */
static json_t *run(long interval, void (*change)(void))
{
    static ModelConfig m;
    Config c;
    m = architecture(LLAMA);
    model_config(&c, &m, "f32", 1);
    c.save_folder = shared;
    char path[64];
    snprintf(path, sizeof path, "%s/stderr-%d", shared, comm_rank());
    const int terminal = dup(STDERR_FILENO);
    assert_non_null(freopen(path, "w", stderr));
    comm_barrier(); /* no rank prints anything before all ranks have started */
    Log *log = log_open(&c, NULL, (RunLength){ .steps = 100 }, 100, 0, false, comm_size());
    GpuHealth *h = gpu_health_open(log, interval, 0, 0, 0.001);
    for (long step = 1; step <= 20; step++) {
        usleep(20000);
        gpu_health_step(h, step, step * TOKENS);
        if (step == 10 && change)
            change();
    }
    gpu_health_close(h);
    log_close(log);
    fflush(stderr);
    dup2(terminal, STDERR_FILENO);
    close(terminal);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    heard[fread(heard, 1, sizeof heard - 1, f)] = '\0';
    fclose(f);
    unlink(path);
    return comm_rank() == 0 ? last_line() : NULL;
}

static double found(json_t *line, const char *name)
{
    json_t *v = json_object_get(line, name);
    return v ? json_number_value(v) : NAN;
}

static void expect(json_t *line, const char *name, double x)
{
    const double y = found(line, name);
    if (!(fabs(y - x) <= 1e-8 * fabs(x))) /* metrics.jsonl has nine digits */
        fail_msg("%s is %.9g, expected %.9g", name, y, x);
}

static void make_hot(void)
{
    if (comm_rank() == comm_size() - 1) {
        fake.reasons = 0x20 | 0x04;
        fake.temperature = 90;
    }
}

static int count(const char *text)
{
    int n = 0;
    for (const char *at = heard; (at = strstr(at, text)); at++)
        n++;
    return n;
}

/* The GPU of the last rank becomes hot. Only that rank reports it, once. */
TEST(test_run)
{
    const int W = comm_size();
    const bool last = comm_rank() == W - 1;
    const double S = W * (W + 1) / 2.0; /* 1 + 2 + ... */
    char expected[64];
    fake_gpu();
    fake.corrected = 2;
    fake.no_energy = true;
    json_t *line = run(1, make_hot);
    snprintf(expected, sizeof expected, "warning: rank %d on ", W - 1);
    assert_int_equal(count("warning"), last);
    assert_int_equal(count(expected), last);
    assert_int_equal(count("because the GPU is hot (now 90 degrees Celsius"), last);
    if (!line)
        return;
    expect(line, "system/gpu_power_watts", 100 * S / W);
    expect(line, "system/gpu_power_watts_max", 100 * W);
    expect(line, "system/gpu_power_limit_watts", 700);
    expect(line, "system/gpu_temperature_celsius_max", 90);
    expect(line, "system/gpu_temperature_celsius",
           (50 * (W - 1) + (W - 1) * (W - 2) / 2.0 + 90) / W);
    expect(line, "system/gpu_sm_clock_mhz", 1900 - 100 * (W - 1) / 2.0);
    expect(line, "system/gpu_sm_clock_mhz_min", 1900 - 100 * (W - 1));
    expect(line, "system/gpu_memory_clock_mhz", 3201);
    expect(line, "system/gpu_power_capped_share", 1.0 / W);
    expect(line, "system/gpu_slowed_share", 1.0 / W);
    expect(line, "system/gpu_ecc_corrected", 2 * W);
    expect(line, "system/gpu_ecc_uncorrected", 0);
    expect(line, "system/gpus_at_fault", 1);
    assert_true(isnan(found(line, "system/gpu_energy_joules")));
    json_decref(line);
}

static void add_error(void)
{
    fake.uncorrected++;
}

/* Permanent faults are reported at the start, and again after a further error. */
TEST(test_errors)
{
    fake_gpu();
    fake.uncorrected = 1;
    fake.pending = 1;
    json_decref(run(1, add_error));
    assert_int_equal(count("has faulty rows of memory"), 1);
    assert_int_equal(count("could not be corrected, 1 since"), 1);
    assert_int_equal(count("could not be corrected, 2 since"), 1);
    assert_int_equal(count("warning"), 3);
}

/* The energy is counted between readings, all within the run: 20 steps of 20 ms or longer. So it is
 * at least the energy of one step, and at most the energy of the time that rank 0 measures. How
 * long a single reading takes depends on the system. */
TEST(test_energy)
{
    const double watts = 100 * comm_size() * (comm_size() + 1) / 2.0;
    fake_gpu();
    const double start = clock_seconds();
    json_t *line = run(5, NULL);
    const double seconds = clock_seconds() - start;
    assert_string_equal(heard, "");
    if (!line)
        return;
    const double joules = found(line, "system/gpu_energy_joules"),
                 power = found(line, "system/gpu_power_watts") * comm_size();
    assert_true(joules > watts / 50 && joules <= watts * seconds && power > 0);
    /* at most 50 steps a second */
    const double rate = found(line, "system/tokens_per_joule") * power;
    assert_true(rate > 0 && rate <= 1.01 * TOKENS / 0.020);
    assert_int_equal(json_integer_value(json_object_get(line, "step")) % 5, 0);
    json_decref(line);
}

/* A rank whose device reports no values takes part, but does not count. */
TEST(test_blind_rank)
{
    fake_gpu();
    const int W = comm_size();
    fake.opened = W == 1 || comm_rank() > 0;
    json_t *line = run(1, NULL);
    if (!line)
        return;
    const double first = W == 1 ? 0 : 1; /* first rank with values */
    expect(line, "system/gpu_temperature_celsius", 50 + (first + W - 1) / 2);
    expect(line, "system/gpu_temperature_celsius_max", 50 + W - 1);
    expect(line, "system/gpu_sm_clock_mhz_min", 1900 - 100 * (W - 1));
    json_decref(line);
}

TEST(test_no_library)
{
    fake_gpu();
    fake.opened = false;
    assert_null(run(1, NULL));
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(make_shared, remove_shared));
}
