/* Which release of Slurm has loaded the plugin. */
#ifndef ELASTIC_SLURM_RELEASE_H
#define ELASTIC_SLURM_RELEASE_H

#include <stdbool.h>

/* Whether the plugin was tried with that release; in others it adds no option. */
bool is_tried_release(void);

#endif
