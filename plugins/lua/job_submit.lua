-- job_submit script of slurmctld for sites without their own (JobSubmitPlugins=lua). A site that
-- has one copies the lines down to `end`, and calls the two functions last: docs/directive.md.
-- An error in here must never block a submission.

local here = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
package.path = here .. "?.lua;/usr/share/slurm-elastic/lua/?.lua;" .. package.path
local loaded, elastic = pcall(require, "slurm_elastic")
if not loaded then
	slurm.log_error("slurm_elastic: not loaded, jobs run unmanaged: %s", tostring(elastic))
	elastic = nil
end

-- Tell the user of --elastic that the modules are missing.
local function tell_user(job_desc)
	for _, setting in pairs(job_desc.spank_job_env or {}) do
		if setting:match("^ELASTIC=") then
			slurm.log_user("elastic: the modules are missing on slurmctld's host, this job is not"
				.. " resized; please tell the administrators")
		end
	end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
	if not elastic then
		pcall(tell_user, job_desc)
		return slurm.SUCCESS
	end
	return elastic.job_submit(job_desc, part_list, submit_uid)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
	return elastic and elastic.job_modify(job_desc, job_rec, part_list, modify_uid)
		or slurm.SUCCESS
end

return slurm.SUCCESS
