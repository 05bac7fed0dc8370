/*
 * What Slurm looks up when it loads the plugin: its name, and the release that it was built for.
 *
 * Slurm rejects a plugin of another release, with a line at every sbatch of every user. What this
 * plugin uses of spank.h is the same in all releases from 22.05 to 26.05. So it reports the release
 * that loads it, known from the number of libslurm's interface; a constructor runs before Slurm
 * reads it. One build serves all releases, and an upgrade of Slurm disturbs no sbatch. In a release
 * that was not tried the plugin loads and does nothing: --elastic is then an unknown option.
 * docs/adr/0016-one-spank-plugin.md
 */

#include "slurm_release.h"

#include <slurm/spank.h>
#include <stddef.h>

/* Number of the library's interface, by release. It grows by one with each release, every half a
 * year from 23.11 on. */
enum { SLURM_22_05 = 38, SLURM_23_02 = 39, SLURM_23_11 = 40, SLURM_26_05 = 45 };

#define RELEASE(year, month) ((unsigned int)(year) << 16 | (unsigned int)(month) << 8)

/* Weak: where nobody defines it, the plugin loads and does nothing. */
extern long slurm_api_version(void) __attribute__((weak));

extern const char plugin_name[], plugin_type[];
extern const unsigned int spank_plugin_version;
extern unsigned int plugin_version;

const char plugin_name[] = "elastic";
const char plugin_type[] = "spank";
const unsigned int spank_plugin_version = 1;
unsigned int plugin_version;

static long interface;

bool is_tried_release(void)
{
	return (interface >= SLURM_23_11 && interface <= SLURM_26_05);
}

__attribute__((constructor)) static void report_loading_release(void)
{
	long later;

	if (slurm_api_version != NULL)
		interface = slurm_api_version() >> 16;
	later = interface - SLURM_23_11;
	if (interface == SLURM_22_05)
		plugin_version = RELEASE(22, 5);
	else if (interface == SLURM_23_02)
		plugin_version = RELEASE(23, 2);
	else if (later >= 0)
		plugin_version = RELEASE(23 + (later + 1) / 2, later % 2 ? 5 : 11);
}
