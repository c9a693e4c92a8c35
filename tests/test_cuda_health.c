/* NVML on a real GPU: values in the ranges of supported GPUs, an energy counter that agrees with
 * the power, and the time of a reading. */
#include "tests/test.h"
#include "tests/kit.h"

#include "kernels/runtime/clock.h"

enum { READINGS = 20 };

static void expect_between(const char *what, double x, double low, double high)
{
    printf("%s: %g\n", what, x);
    if (!(x >= low && x <= high))
        fail_msg("%s is %g, expected %g to %g", what, x, low, high);
}

TEST(test_values)
{
    DeviceHealth d;
    assert_true(device_health(&d));
    printf("%s at %s, faults %x, power capped: %g\n", device_name(), device_address(), d.faults,
           d.power_capped);
    expect_between("power, W", d.power, 1, 2000);
    expect_between("power limit, W", d.power_limit, 50, 2000);
    expect_between("temperature, C", d.temperature, 5, 110);
    expect_between("SM clock, MHz", d.sm_clock, 50, 5000);
    expect_between("memory clock, MHz", d.memory_clock, 50, 20000);
    assert_true(d.power_capped == 0 || d.power_capped == 1);
}

/* Writes memory for one and a half seconds: the power is an average over a second, and the counter
 * moves every 0.1 s. */
TEST(test_energy)
{
    const size_t bytes = (size_t)1 << 30;
    void *memory = device_alloc(bytes);
    DeviceHealth from, to;
    assert_true(device_health(&from));
    const double start = clock_seconds();
    while (clock_seconds() - start < 1.5) {
        for (int i = 0; i < 100; i++)
            device_zero(memory, bytes);
        device_sync();
    }
    assert_true(device_health(&to));
    const double seconds = clock_seconds() - start;
    device_free(memory);
    expect_between("counted power over that told", (to.energy - from.energy) / seconds / to.power,
                   0.4, 2.5);
}

TEST(test_cost)
{
    DeviceHealth d;
    const double start = clock_seconds();
    for (int i = 0; i < READINGS; i++)
        assert_true(device_health(&d));
    expect_between("ms per reading", 1e3 * (clock_seconds() - start) / READINGS, 0, 500);
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
