/*
 * Replacement for a Slurm command of one release: loads the plugin that is named, and prints the
 * release that it reports and whether it adds --elastic. The number of the interface is
 * the second argument.
 */

#include <dlfcn.h>
#include <slurm/spank.h>
#include <stdio.h>
#include <stdlib.h>

static long interface;
static int registered;

long slurm_api_version(void)
{
	return (interface << 16);
}

enum spank_context spank_context(void)
{
	return (S_CTX_LOCAL);
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	(void)option;
	registered = 1;
	return (ESPANK_SUCCESS);
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	(void)name;
	(void)value;
	(void)overwrite;
	return (ESPANK_SUCCESS);
}

void slurm_error(const char *format, ...)
{
	fputs(format, stderr);
}

int main(int argc, char **argv)
{
	unsigned int *version;
	int (*init)(spank_t, int, char **);
	void *plugin;

	interface = argc == 3 ? atol(argv[2]) : 0;
	plugin = argc == 3 ? dlopen(argv[1], RTLD_LAZY) : NULL;
	if (plugin == NULL)
		return (1);
	version = dlsym(plugin, "plugin_version");
	*(void **)&init = dlsym(plugin, "slurm_spank_init");
	if (version == NULL || init == NULL || init(NULL, 0, NULL) != 0)
		return (1);
	printf("%u.%02u.%u %d\n", *version >> 16, *version >> 8 & 0xff, *version & 0xff,
	       registered);
	return (0);
}
