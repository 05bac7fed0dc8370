/*
 * Replacement for Slurm's <slurm/spank.h> where the plugin is fuzzed or built without Slurm: the
 * names that the plugin uses. Never installed.
 */
#ifndef ELASTIC_FUZZ_SPANK_H
#define ELASTIC_FUZZ_SPANK_H

typedef struct spank_handle *spank_t;
typedef int spank_err_t;

enum { ESPANK_SUCCESS, ESPANK_ERROR };

enum spank_context {
	S_CTX_ERROR,
	S_CTX_LOCAL,
	S_CTX_REMOTE,
	S_CTX_ALLOCATOR,
	S_CTX_SLURMD,
	S_CTX_JOB_SCRIPT,
};

struct spank_option {
	char *name;
	char *arginfo;
	char *usage;
	int has_arg;
	int val;
	int (*cb)(int value, const char *text, int remote);
};

enum spank_context spank_context(void);
spank_err_t spank_option_register(spank_t sp, struct spank_option *option);
spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite);
long slurm_api_version(void);
void slurm_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

int slurm_spank_init(spank_t sp, int ac, char **av);
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av);

#endif
