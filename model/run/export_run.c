#include "model/run/export_run.h"

#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/checkpoint.h"
#include "model/export/export.h"
#include "model/config/export_options.h"
#include "model/calibrate/calibrate.h"

/* Checks all inputs before it creates files. */
static void export_calibrated(const ExportOptions *o)
{
    Export x = export_open(o);
    CalibrationData data = calibration_read(o, &x);
    device_init(comm_local_rank());
    export_begin(&x, CHECKPOINT_FILE_BYTES);
    calibrate(&x, o, &data);
    calibration_free(&data);
    export_complete(&x);
}

void export_run(int argc, char **argv)
{
    ExportOptions o;
    if (comm_size() > 1)
        die("--export runs in one process, not in %d: start it without mpirun", comm_size());
    export_options_read(&o, argc, argv);
    if (o.num_calibration > 0)
        export_calibrated(&o);
    else
        export_to(&o, CHECKPOINT_FILE_BYTES);
    export_options_free(&o);
}
