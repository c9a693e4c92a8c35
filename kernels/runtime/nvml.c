/* The few NVML functions that a run needs, found by name in the driver's library [NVML API
 * Reference Guide].
 *
 * Signatures and numbers are declared here for two reasons: only some CUDA toolkits have nvml.h,
 * and the CPU back end, whose tests substitute their own library, is built without a toolkit. Both
 * belong to NVML's ABI, which does not change. */
#include "kernels/runtime/nvml.h"

#include <dlfcn.h>
#include <math.h>
#include <string.h>

enum {
    TEMPERATURE_GPU = 0,
    CLOCK_SM = 1,
    CLOCK_MEMORY = 2,
    ECC_CORRECTED = 0,
    ECC_UNCORRECTED = 1,
    ECC_VOLATILE = 0
};

/* Reasons for a lowered clock: nvmlClocksEventReasons. */
enum {
    REASON_POWER_CAP = 0x04,
    REASON_HARDWARE = 0x08,
    REASON_SOFTWARE_THERMAL = 0x20,
    REASON_HARDWARE_THERMAL = 0x40,
    REASON_POWER_BRAKE = 0x80
};

typedef struct nvmlDevice_st *Gpu;
typedef unsigned long long Count;

static struct {
    Gpu gpu;
    int (*init)(void);
    int (*find)(const char *address, Gpu *gpu);
    int (*power)(Gpu gpu, unsigned *milliwatts);
    int (*power_limit)(Gpu gpu, unsigned *milliwatts);
    int (*energy)(Gpu gpu, Count *millijoules);
    int (*temperature)(Gpu gpu, int sensor, unsigned *celsius);
    int (*clock)(Gpu gpu, int type, unsigned *mhz);
    int (*reasons)(Gpu gpu, Count *bits);
    int (*ecc_errors)(Gpu gpu, int type, int counter, Count *errors);
    int (*remapped_rows)(Gpu gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                         unsigned *failed);
} nvml;

/* If two names have the same pointer, the second is the name in newer drivers. */
static const struct {
    const char *name;
    void *call;
} calls[] = {
    { "nvmlInit_v2", &nvml.init },
    { "nvmlDeviceGetHandleByPciBusId_v2", &nvml.find },
    { "nvmlDeviceGetPowerUsage", &nvml.power },
    { "nvmlDeviceGetEnforcedPowerLimit", &nvml.power_limit },
    { "nvmlDeviceGetTotalEnergyConsumption", &nvml.energy },
    { "nvmlDeviceGetTemperature", &nvml.temperature },
    { "nvmlDeviceGetClockInfo", &nvml.clock },
    { "nvmlDeviceGetCurrentClocksThrottleReasons", &nvml.reasons },
    { "nvmlDeviceGetCurrentClocksEventReasons", &nvml.reasons },
    { "nvmlDeviceGetTotalEccErrors", &nvml.ecc_errors },
    { "nvmlDeviceGetRemappedRows", &nvml.remapped_rows },
};

bool nvml_open(const char *address)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return false;
    memset(&nvml, 0, sizeof nvml);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        void *call = dlsym(library, calls[i].name);
        if (call)
            memcpy(calls[i].call, &call, sizeof call);
    }
    return nvml.init && nvml.find && nvml.init() == 0 && nvml.find(address, &nvml.gpu) == 0;
}

/* Returns x, or NAN if `status`, the return value of the call that wrote x, is not 0. */
static double value(int status, double x)
{
    return status == 0 ? x : NAN;
}

static double read_unsigned(int (*call)(Gpu, unsigned *))
{
    unsigned x = 0;
    const int status = call ? call(nvml.gpu, &x) : 1;
    return value(status, x);
}

static double read_clock(int type)
{
    unsigned x = 0;
    const int status = nvml.clock ? nvml.clock(nvml.gpu, type, &x) : 1;
    return value(status, x);
}

static double read_ecc(int type)
{
    Count x = 0;
    const int status = nvml.ecc_errors ? nvml.ecc_errors(nvml.gpu, type, ECC_VOLATILE, &x) : 1;
    return value(status, (double)x);
}

/* The driver sets the general slowdown together with its cause, if the cause is known. */
static unsigned slowdowns(Count reasons)
{
    unsigned faults = 0;
    if (reasons & REASON_SOFTWARE_THERMAL)
        faults |= 1u << FAULT_HOT;
    if (reasons & REASON_HARDWARE_THERMAL)
        faults |= 1u << FAULT_TOO_HOT;
    if (reasons & REASON_POWER_BRAKE)
        faults |= 1u << FAULT_POWER_BRAKE;
    if (reasons & REASON_HARDWARE && !(reasons & (REASON_HARDWARE_THERMAL | REASON_POWER_BRAKE)))
        faults |= 1u << FAULT_SLOWDOWN;
    return faults;
}

void nvml_read(DeviceHealth *h)
{
    Count energy = 0, reasons = 0;
    unsigned celsius = 0, corrected, uncorrected, pending = 0, failed = 0;
    const int has_energy = nvml.energy ? nvml.energy(nvml.gpu, &energy) : 1;
    const int has_celsius =
        nvml.temperature ? nvml.temperature(nvml.gpu, TEMPERATURE_GPU, &celsius) : 1;
    const int has_reasons = nvml.reasons ? nvml.reasons(nvml.gpu, &reasons) : 1;
    const int has_rows = nvml.remapped_rows ? nvml.remapped_rows(nvml.gpu, &corrected, &uncorrected,
                                                                 &pending, &failed)
                                            : 1;
    *h = (DeviceHealth){
        .power = read_unsigned(nvml.power) / 1e3,
        .power_limit = read_unsigned(nvml.power_limit) / 1e3,
        .energy = value(has_energy, (double)energy / 1e3),
        .temperature = value(has_celsius, celsius),
        .sm_clock = read_clock(CLOCK_SM),
        .memory_clock = read_clock(CLOCK_MEMORY),
        .power_capped = value(has_reasons, (reasons & REASON_POWER_CAP) != 0),
        .ecc_corrected = read_ecc(ECC_CORRECTED),
        .ecc_uncorrected = read_ecc(ECC_UNCORRECTED),
        .faults = has_reasons == 0 ? slowdowns(reasons) : 0,
    };
    if (h->ecc_uncorrected > 0)
        h->faults |= 1u << FAULT_ECC;
    if (has_rows == 0 && pending)
        h->faults |= 1u << FAULT_REMAP_PENDING;
    if (has_rows == 0 && failed)
        h->faults |= 1u << FAULT_REMAP_FAILED;
}
